"""Passes: functions from program to program; ``gradtrace.ir.optimise`` lists them in order."""
