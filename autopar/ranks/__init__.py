"""Ranks: processes, their rendezvous, deadlines and clean-up."""
