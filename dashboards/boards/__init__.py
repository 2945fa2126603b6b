"""The boards: what each shows, panel by panel; in the order of the links between them."""

from dashboards.boards.fleet import FLEET
from dashboards.boards.pool import POOL
from dashboards.boards.routing import ROUTING

BOARDS = (FLEET, POOL, ROUTING)
