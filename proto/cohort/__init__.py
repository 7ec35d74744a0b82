"""Generated messages and stubs of the Cohort API."""
