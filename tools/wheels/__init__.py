"""Wheels for other machines than this one: ``make wheels``."""
