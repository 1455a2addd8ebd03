"""Owners: who has which page and which slot, kept on the host; the device only ever sees tables."""
