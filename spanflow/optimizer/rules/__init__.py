"""The laws, one a file or a few that belong together; each rule set is a tuple."""
