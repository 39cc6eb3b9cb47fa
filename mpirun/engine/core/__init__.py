"""The core: what every step executes, whatever the schedule. The features around it it knows as `interfaces`."""
