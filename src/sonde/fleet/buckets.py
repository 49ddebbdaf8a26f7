# SPDX-License-Identifier: Apache-2.0
"""The bucket of a sample: application class × kernel class × activity level."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.errors import UsageError
from sonde.fleet.classify import Classes
from sonde.fleet.task import Task


@dataclass(frozen=True)
class BucketSpace:
    """The grid of buckets. Its size is fixed in the task, so it has room for more classes than have
    names today: those to come.

    `levels` divides the hardware activity, in [0, 1], into equal steps.
    """

    applications: int = 64
    kernels: int = 64
    levels: int = 1

    @property
    def size(self) -> int:
        """Buckets of a report."""
        return self.applications * self.kernels * self.levels

    def index(self, application: int, kernel: int, activity: float = 0.0) -> int:
        """The bucket of a sample. A class outside the grid becomes `other` (1), or the only class
        (0) of a grid with one.
        """
        application = (
            application if application < self.applications else min(1, self.applications - 1)
        )
        kernel = kernel if kernel < self.kernels else min(1, self.kernels - 1)
        level = min(self.levels - 1, max(0, int(activity * self.levels)))
        return (application * self.kernels + kernel) * self.levels + level

    def label(self, bucket: int) -> tuple[str, str, str]:
        """(application, kernel, activity) as text."""
        classes = Classes.shipped()
        cell, level = divmod(bucket, self.levels)
        application, kernel = divmod(cell, self.kernels)
        low, high = level / self.levels, (level + 1) / self.levels
        activity = "" if self.levels == 1 else f"{low:.0%}-{high:.0%}"
        return classes.application_name(application), classes.kernel_name(kernel), activity

    @staticmethod
    def of_task(task: Task) -> BucketSpace:
        """The grid of a task. One column of buckets if the task defines none (then each is an
        application class) or has a `purpose`, as one of `discovery` (then each is a hash of names
        of kernels). Raises UsageError.
        """
        if not task.space or "purpose" in task.space:
            return BucketSpace(task.buckets, 1, 1)
        try:
            space = BucketSpace(**task.space)
        except TypeError as error:
            raise UsageError("not a bucket grid", "put task.json back as it was made") from error
        sizes = (space.applications, space.kernels, space.levels)
        if not all(type(size) is int and 0 < size <= task.buckets for size in sizes):
            raise UsageError("not a bucket grid", "give whole numbers from 1 on, in task.json")
        if space.size != task.buckets:
            raise UsageError(f"the grid has {space.size} buckets, the task {task.buckets}")
        return space
