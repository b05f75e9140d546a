"""Reward and preference functions, and judges: what they are given, how they are called, what they may return."""

from strop.rewards.functions import MetricsFunctions as MetricsFunctions
from strop.rewards.functions import OutOfTime as OutOfTime
from strop.rewards.functions import PreferenceFunction as PreferenceFunction
from strop.rewards.functions import RewardError as RewardError
from strop.rewards.functions import RewardFunctions as RewardFunctions
from strop.rewards.functions import Rewards as Rewards
from strop.rewards.functions import reward_columns as reward_columns
from strop.rewards.functions import sample_table as sample_table
from strop.rewards.functions import time_limit as time_limit
from strop.rewards.identity import described as described
from strop.rewards.judge import Judge as Judge
