"""Speculation in plain NumPy: noise, sampling, acceptance, trees and proposals. The oracle of both services."""
