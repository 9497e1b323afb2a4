"""Finds names of people, machines, addresses and paths in texts, and replaces them by reproducible pseudonyms.

Does not know traces, and does not find what looks like an ordinary word: such names must be given.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

PSEUDONYM_DIGITS: Final = 10
MIN_LEARNT: Final = 3
"""Names shorter than this are replaced where they were recognised, and not looked for elsewhere."""

_TOP_DOMAINS: Final = (
    "com org net edu gov mil int info local localdomain internal intranet lan corp cluster svc cloud home arpa "
    "de uk fr jp cn ch nl kr ca au at se it es pl ru br tw sg fi dk be cz"
)
_SYSTEM_USERS: Final = ("root", "user", "users", "home", "runner", "admin", "ubuntu", "nobody")
_NO_NAMES: Final = frozenset(
    [*_SYSTEM_USERS, "shared", "data", "work", "default", "public", "localhost", "none", "null", "true", "false"]
)
_URL: Final = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_MAIL: Final = re.compile(r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*")
_UNC: Final = re.compile(r"\\\\[\w.$-]+(?:\\[^\s\"'<>|:*?]+)+")
_WINDOWS: Final = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]:\\[^\s\"'<>|:*?,;]*")
_POSIX: Final = re.compile(r"(?:(?<=[\s\"'=:,;()\[\]{}<>|])|^)~?[\w.-]*/(?<=/)(?:[^\s\"'<>|:,;()\[\]{}]+)")
_ONE_PATH: Final = re.compile(r"/[^\n\"'/]+/[^\n\"']*")
_IP4: Final = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_IP6: Final = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f.]{0,15}(?![\w:])")
_FQDN: Final = re.compile(
    r"(?<![\w.-])(?:[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?\.)+(?:" + "|".join(_TOP_DOMAINS.split()) + r")(?![\w-])"
)
_NODE: Final = re.compile(
    r"(?<![A-Za-z0-9.-])(?:ip-\d{1,3}(?:-\d{1,3}){3}"
    r"|(?:node|host|dgx|hgx|nid|compute|login|worker|server|gpunode|slurm)[a-z]*(?:-[a-z0-9]+)*[-_]?\d{2,})(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_HOME: Final = re.compile(r"(?:/home/|/Users/|/u/|[A-Za-z]:\\Users\\|^~)([\w.+-]+)")
_HOST_KEY: Final = re.compile(
    r"(?:^|[._-])(?:host|hosts|hostname|hostnames|node|nodes|nodename|nodelist|fqdn|master_addr)$", re.IGNORECASE
)
_USER_KEY: Final = re.compile(r"(?:^|[._-])(?:user|users|username|login|owner|author|account)$", re.IGNORECASE)
_WORD: Final = re.compile(r"[\w.@+-]+")


class Pseudonymiser:
    """Replaces secrets in texts. The same secret gives the same pseudonym under the same key.

    `learn` every text first: a user whose home folder one text names, or the host of an address, is then replaced in
    all of them. `counts` says how many distinct secrets of each class were replaced.
    """

    def __init__(self, key: bytes, *, names: Iterable[str] = ()) -> None:
        self._key = key
        self._words: dict[str, str] = {name: "name" for name in names if name}
        self._given = frozenset(self._words)
        self._pattern: re.Pattern[str] | None = None
        self._cache: dict[str, str] = {}
        self._made: dict[str, str] = {}
        self.secrets: dict[str, str] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Class of secret -> number of distinct ones that were replaced."""
        return dict(sorted(Counter(self.secrets.values()).items()))

    def pseudonym(self, kind: str, secret: str) -> str:
        """`host-3f9a...`: what stands for a secret."""
        digest = hmac.new(self._key, f"{kind}\0{secret}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        self.secrets.setdefault(secret, kind)
        made = f"{kind}-{digest[:PSEUDONYM_DIGITS]}"
        self._made[made] = secret
        return made

    def learn(self, text: str, *, key: str = "") -> None:
        """Takes in names of users and hosts that the text gives away; `key` is the metadata key that it belongs to."""
        for name, value in _leaves(key, text) if key else ():
            for kind, pattern in (("host", _HOST_KEY), ("user", _USER_KEY)):
                if pattern.search(name):
                    for word in _WORD.findall(value):
                        self._remember(kind, word)
        for match in _HOME.finditer(text):
            self._remember("user", match.group(1))
        for pattern in (_FQDN, _NODE):
            for match in pattern.finditer(text):
                self._remember("host", match.group(0))
        for match in _MAIL.finditer(text):
            self._remember("user", match.group(0).partition("@")[0])

    def _remember(self, kind: str, word: str) -> None:
        word = word.strip(".-_+@")
        if len(word) < MIN_LEARNT or word.lower() in _NO_NAMES or word.isdigit() or word in self._words:
            return
        self._words[word] = kind
        self._pattern, self._cache = None, {}
        short = word.partition(".")[0]
        if kind == "host" and short != word and not _is_ip4(word):
            self._remember("host", short)

    def replace(self, text: str) -> str:
        """The text with every secret replaced."""
        known = self._cache.get(text)
        if known is None:
            known = self._cache[text] = self._replace(text)
        return known

    def _replace(self, text: str) -> str:
        if text in self._made:
            return text
        if _ONE_PATH.fullmatch(text):
            return self.pseudonym("path", text)
        for kind, pattern in (("url", _URL), ("mail", _MAIL), ("path", _UNC), ("path", _WINDOWS)):
            text = pattern.sub(lambda match, kind=kind: self.pseudonym(kind, match.group(0)), text)  # type: ignore[misc]
        text = _POSIX.sub(self._path, text)
        text = _IP4.sub(lambda match: self.pseudonym("ip", match[0]) if _is_ip4(match[0]) else match[0], text)
        text = _IP6.sub(lambda match: self.pseudonym("ip", match[0]) if _is_ip6(match[0]) else match[0], text)
        if self._words:
            if self._pattern is None:
                self._pattern = self._compiled()
            text = self._pattern.sub(lambda match: self.pseudonym(self._kind_of(match[0]), match[0]), text)
        for pattern in (_FQDN, _NODE):
            text = pattern.sub(
                lambda match: match[0] if match[0] in self._made else self.pseudonym("host", match[0]), text
            )
        return text

    def _compiled(self) -> re.Pattern[str]:
        """Learnt names as whole words; names that were given also inside words."""
        words = sorted(self._words, key=len, reverse=True)
        parts = [
            re.escape(word) if word in self._given else rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"
            for word in words
        ]
        return re.compile("|".join(parts), re.IGNORECASE)

    def _kind_of(self, word: str) -> str:
        kind = self._words.get(word)
        return kind or next((kind for known, kind in self._words.items() if known.lower() == word.lower()), "name")

    def _path(self, match: re.Match[str]) -> str:
        text = match.group(0)
        absolute = text.startswith(("/", "~"))
        rest = text.rstrip(".,")
        if not absolute or not re.search(r"[A-Za-z]", rest) or rest.startswith("//"):
            return text
        return self.pseudonym("path", rest) + text[len(rest) :]

    def arguments(self, text: str) -> str:
        """A command line (a JSON list of words) of which flags and numbers are kept and every other word replaced."""
        try:
            words = json.loads(text)
        except ValueError:
            return self.pseudonym("text", text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return self.pseudonym("text", text)
        return json.dumps([self._argument(word) for word in words])

    def _argument(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        if not re.fullmatch(r"-{1,2}[A-Za-z][\w.-]*", flag) or self._hides_a_word(flag):
            return self._value(word)
        return flag + equals + self._value(value) if equals else flag

    def _hides_a_word(self, flag: str) -> bool:
        return bool(self._words) and self.replace(flag) != flag

    def _value(self, word: str) -> str:
        if not word or re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|true|false|none", word, re.IGNORECASE):
            return word
        return self.pseudonym("path" if _ONE_PATH.fullmatch(word) else "arg", word)

    def whole(self, text: str) -> str:
        """One pseudonym for the whole text; the empty text stays."""
        return self.pseudonym("text", text) if text else text


def _leaves(key: str, text: str) -> Iterator[tuple[str, str]]:
    """The text under its key; where it is JSON, every string in it under the key nearest to it."""
    yield key, text
    if not text.lstrip().startswith(("{", "[")):
        return
    try:
        todo: list[tuple[str, object]] = [(key, json.loads(text))]
    except (ValueError, RecursionError):
        return
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += [(str(inner), item) for inner, item in value.items()]
        elif isinstance(value, list):
            todo += [(name, item) for item in value]
        elif isinstance(value, str):
            yield name, value


def remains(text: str, secret: str, kind: str) -> bool:
    """Whether a text still holds a secret, as a whole word or path; a given name also inside a word."""
    return secret in text and bool(boundary(secret, kind).search(text))


@lru_cache(maxsize=1 << 16)
def boundary(secret: str, kind: str) -> re.Pattern[str]:
    """What finds a secret in a text and leaves longer words that only contain it."""
    before, after = {"name": ("", ""), "path": (r"(?<![\w.~/\\-])", r"(?![\w])")}.get(
        kind, ("(?<![A-Za-z0-9])", "(?![A-Za-z0-9])")
    )
    return re.compile(before + re.escape(secret) + after)


def _is_ip4(text: str) -> bool:
    return all(int(part) < 256 for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+){3}", text) else False


def _is_ip6(text: str) -> bool:
    if text.count(":") < 2 or not any(char in "0123456789abcdefABCDEF" for char in text):
        return False
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv6Address)
    except ValueError:
        return False
