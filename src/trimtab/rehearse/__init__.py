"""Rehearsal: runs a training script, unchanged, on virtual accelerators and gathers what would go wrong on real ones.

The parent (`run`) never imports torch and never runs the user's code; that happens in child processes (`child`),
which write what they find line by line, so that a crash, a kill or a time-out still leaves a verdict.
"""
