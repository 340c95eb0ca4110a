"""One optimizer step after another, bit for bit repeatable. ``client``, ``records``, ``model_files`` and
``policy_cache`` need no torch."""
