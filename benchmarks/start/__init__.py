"""How long `mpjax train` takes to its first step."""
