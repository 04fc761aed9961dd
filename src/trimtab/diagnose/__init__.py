"""From an error, a log or a virtual fault to its cause and its fix.

`finding` holds what is reported, `explain` reads pasted text, `causes` follows a fault on virtual devices (or an
exception) back to the line that has to change. Nothing here runs a training, and nothing here imports torch at import.
"""
