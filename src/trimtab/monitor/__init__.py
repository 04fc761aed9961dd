"""What is shown and watched while a run goes: progress, metrics, memory, health and a watchdog.

This room never decides where anything runs (the device is given to it) and never changes the training.
"""
