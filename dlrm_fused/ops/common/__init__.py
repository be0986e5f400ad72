"""Parts that operators share: workspaces, rows sent to other ranks, schedules and what is measured of them, launches."""
