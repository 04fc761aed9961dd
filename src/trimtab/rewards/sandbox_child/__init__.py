"""The processes behind a run of unit tests: a worker runs the completion's code, a judge runs the tests.

Where a test uses a name of the completion, the judge asks the worker; answers come as plain data, or as references to
objects that stay with the worker. Started on its own in an isolated interpreter, so it imports the standard library
and its own parts (`.wire`), never the rest of Trimtab, which takes longer to load than a test to run.
"""
