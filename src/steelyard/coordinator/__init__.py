"""Who may do what, and what has been done: admission, leases, versions, and the journal that they rest on."""
