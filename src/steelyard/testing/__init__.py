"""Fakes and builders that ship with the package, for our tests and for those of its users."""
