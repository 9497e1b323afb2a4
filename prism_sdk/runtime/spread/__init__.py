"""One recording whose ranks run on several machines.

``links`` connects machines; ``branch`` is what runs on each of them, ``host`` what stands in for them where the
coordinator is; ``places`` says which rank is where, ``mirrors`` which bytes are; ``recording`` is the order of things.
Scheduling and matching are the coordinator's, as on one machine.
"""
