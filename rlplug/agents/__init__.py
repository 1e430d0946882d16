"""Rows of agents, for algorithms that contain algorithms: columns x agents as columns of a single agent, and back."""

from rlplug.agents.exploitability import Exploitability as Exploitability
from rlplug.agents.exploitability import probabilities as probabilities
from rlplug.agents.exploration import changes_actions as changes_actions
from rlplug.agents.exploration import exploration_of as exploration_of
from rlplug.agents.policies import Policies as Policies
from rlplug.agents.policies import Policy as Policy
from rlplug.agents.rows import OF_COLUMN as OF_COLUMN
from rlplug.agents.rows import Agent as Agent
from rlplug.agents.rows import agents_of as agents_of
from rlplug.agents.rows import fold as fold
from rlplug.agents.rows import merge as merge
from rlplug.agents.rows import of_groups as of_groups
from rlplug.agents.rows import spec_of as spec_of
from rlplug.agents.rows import unfold as unfold
from rlplug.agents.rows import view as view
from rlplug.agents.rows import with_ids as with_ids
from rlplug.agents.sides import Sides as Sides
from rlplug.agents.sides import sides_of as sides_of
