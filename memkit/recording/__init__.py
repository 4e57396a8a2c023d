"""What ops a forward has run, remembered so that any of them can be run again, exactly."""
