from tests.installing import install, site

__all__ = ["install", "site"]
