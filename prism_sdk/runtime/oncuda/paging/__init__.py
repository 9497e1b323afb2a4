"""Device memory whose pages can leave the device while a rank is parked.

It holds the parts (a library in C, its build, the launcher's side of moves) and no code of its own.
"""
