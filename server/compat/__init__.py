"""The weight routes of other servers, so that trainers made for those can push here as they are."""
