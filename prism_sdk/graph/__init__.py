"""Calculates with the execution graph of a job: matching, timelines, boundary plans, calibration, comparison.

It runs no program and needs no torch: numpy columns in, frozen results out.
"""
