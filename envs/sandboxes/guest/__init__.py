"""The program inside a bubblewrap sandbox: process 1 of its own pid namespace, served over stdin and stdout.

Standard library only and no import of the rest of argosy: these files are copied into the sandbox and run there by
whatever `python3` (>= 3.9) it has. Imports are few, because every start and every fork pays for them.

Invariant: code of others runs only in children, which hold none of this program's descriptors and cannot trace it
(not dumpable) or signal it (process 1). Children share its user id, so they could still lower its limits: then it
dies, or `reset` notices, and either way the owner throws the sandbox away. When the owner goes away, so does this
program, and with process 1 the kernel ends all others.
"""
