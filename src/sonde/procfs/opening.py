# SPDX-License-Identifier: Apache-2.0
"""Which files the child of `procfs.broker` (serve.py) hands out, and how it opens them.

Sound files, whose readers nobody but root can make wait, are handed out as they are. Of the file
systems that an unprivileged user can mount (in a user namespace), two wait for somebody: FUSE for
its server, overlayfs for the file systems below it, which may be FUSE. Files of the kernel's own
(of /proc, /sys and the like) may wait for a lock that somebody holds (`WAITING`). A file on any
other type is handed out; one on overlayfs, where process 1 has that very overlayfs mounted, too
(container runtimes mount there); of the rest a copy in memory.

What lies below a process's root is looked up as that process would: its symbolic links lead nowhere
else, so no container chooses which of the host's files root opens.

No path that a process chose has an automounter (autofs) mount anything, whose map may name any
server: a walk ends where nothing is mounted yet (`step`). And from our root directory only who sees
the same files there as we do (`sees_our_files`) has us ask a disk or a server. For the others, such
as a service with a private /tmp, it is looked at what the kernel has in memory alone
(RESOLVE_CACHED), which waits for nobody; a program that runs is there, with the folders above it.
Programs on other mounts of the machine, such as /home or what an automounter has mounted, are found
like all others: they run, so their mounts are there.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # without typing, which the child would import for nothing
if TYPE_CHECKING:
    from collections.abc import Iterator
if TYPE_CHECKING or __package__:
    from sonde.procfs.proc_folder import here
else:
    from proc_folder import here

OPENING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
OVERLAY_MAGIC, BTRFS_MAGIC = 0x794C7630, 0x9123683E
WAITING = {
    0x65735546,  # FUSE waits for its server …
    # … and files of the kernel's own, which anybody can mount in the place of another, for locks.
    *(0x9FA0, 0x62656572, 0x27E0EB, 0x63677270, 0x64626720, 0x74726163, 0x73636673, 0xCAFE4A11),
    *(0x42494E4D, 0xDE5E81E4, 0x62656570, 0x6165676C, 0xF97CFF8C, 0x0187, 0x6C6F6F70, 0x19800202),
}
"""f_type (statfs(2)) of fuse, proc, sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs, bpf,
binfmt_misc, efivarfs, configfs, pstore, selinuxfs, autofs, binder, mqueue."""
SURE = {b"ext2", b"ext3", b"ext4", b"xfs", b"btrfs", b"f2fs", b"tmpfs", b"ramfs", b"rootfs"}
SURE |= {b"squashfs", b"erofs", b"iso9660", b"vfat", b"zfs", b"devtmpfs"}
"""Types of local file systems that wait for nobody, where process 1 has them mounted."""
MAX_COPIED_SIZE = 64 << 20
"""Bytes of a file that is copied; a longer one is refused."""
COPY_PIECE = 64 << 10
"""Unit of a copy: pieces of zeros are not written, and so take no memory."""
MAX_MOUNTS_BYTES = 4 << 20
"""Of the list of mounts of a process that is looked at: it makes as many as it likes. Process 1's
is read to its end, as there others can only add to it (fusermount)."""
MOUNTS_PIECE = 16 << 10
MAX_MOUNT_LINE = 64 << 10
"""Of a line that is kept; of a longer one device and type."""
MAX_TYPE = 256
FREE_MOUNTS_S = 0.05
"""CPU time of a look at all mounts; after one that takes more …"""
MOUNTS_REST = 9
"""… the next waits for this many times that."""
OPENAT2 = 437
"""Its number, on every architecture."""
HOW = struct.Struct("=QQQ")
"""struct open_how: flags, mode, resolve."""
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT, RESOLVE_CACHED = 0x02, 0x10, 0x20
NOT_IN_MEMORY = {errno.EAGAIN, errno.EINVAL, errno.ENOSYS, errno.EPERM}
"""Of RESOLVE_CACHED: EAGAIN, or it is not known: EINVAL before Linux 5.12, ENOSYS before 5.6, EPERM
by a seccomp filter that is older."""
PROC_MAGIC, AUTOFS_MAGIC = 0x9FA0, 0x0187
READABLE, LISTABLE = 0o044, 0o055
"""Modes of a file, and of a folder whose names everybody can see, that are for everybody: a user of
the group has not the rights of others, but the group's."""
MAX_LINKS = 40
"""Symbolic links of a path that are followed, as the kernel has it."""


class Mounts:
    """Which file systems process 1 has mounted; of this process, where that cannot be read."""

    def __init__(self) -> None:
        self.file: int | None = None
        for pid in ("1", "self"):
            try:
                self.file = os.open(here(f"/proc/{pid}/mountinfo"), os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError:
                continue
        self.poll = select.poll()
        if self.file is not None:
            self.poll.register(self.file, select.POLLPRI | select.POLLERR)
        self.known: dict[bytes, bytes] | None = None
        """Types by device (MAJOR:MINOR); read again when poll() reports a change, which it does
        once. None: to be read."""
        self.next_s = 0.0
        """Not before this (CLOCK_MONOTONIC)."""

    def type_of(self, device: bytes) -> bytes:
        """The type of the file system of a device; b"": it is not mounted there. Raises OSError
        (EBUSY) where they changed and may not be read again yet."""
        if self.file is None:
            return b""
        if self.known is not None and not self.poll.poll(0):
            return self.known.get(device, b"")
        self.known = None
        if time.monotonic() < self.next_s:
            raise OSError(errno.EBUSY, "mounts change too often")
        began_s = time.thread_time()
        self.known = {device: kind for _, device, kind in mounts_in(self.file)}
        took_s = time.thread_time() - began_s
        if took_s > FREE_MOUNTS_S:
            self.next_s = time.monotonic() + MOUNTS_REST * took_s
        return self.known.get(device, b"")


def mounts_in(fd: int, limit: int = sys.maxsize) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(number of the mount, device, type of its file system) of each line in the first `limit`
    bytes of a mountinfo.

    Fields are separated by single blanks: in a name the kernel escapes these and line feeds, and no
    other white space.
    """
    os.lseek(fd, 0, os.SEEK_SET)
    rest = b""
    while limit > 0 and (piece := os.read(fd, min(limit, MOUNTS_PIECE))):
        limit -= len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            before, dash, after = line.partition(b" - ")
            fields = before.split(b" ", 3)
            if dash and len(fields) == 4:
                yield fields[0], fields[2], after.partition(b" ")[0]
        if len(rest) > MAX_MOUNT_LINE:
            rest = shortened(rest)


def shortened(line: bytes) -> bytes:
    """The beginning of a line of mountinfo, without the names in it."""
    at = line.find(b" - ")
    end = line[-2:] if at < 0 else line[at : at + MAX_TYPE]
    return b" ".join(line.split(b" ", 3)[:3]) + b" /" + end


def file_system(fd: int) -> int:
    """f_type of statfs(2)."""
    import ctypes

    buffer = (ctypes.c_long * 64)()
    if ctypes.CDLL(None, use_errno=True).fstatfs(fd, buffer):
        raise OSError(ctypes.get_errno(), "fstatfs")
    return buffer[0] & 0xFFFFFFFF


def device_of(fd: int, *pids: int) -> bytes | None:
    """Device of the file system that an open file lies on, as /proc/PID/mountinfo of one of these
    processes, of this or of process 1 has it; None: none has.

    On overlayfs stat() shows another one, and before Linux 6.8 so do mappings.
    """
    with open(here(f"/proc/self/fdinfo/{fd}"), "rb") as file:  # noqa: PTH123
        words = file.read().split()
    mount = words[words.index(b"mnt_id:") + 1]
    for who in (*pids, "self", 1):
        try:
            mounts = os.open(here(f"/proc/{who}/mountinfo"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            limit = MAX_MOUNTS_BYTES if who in pids else sys.maxsize
            for number, device, _ in mounts_in(mounts, limit):
                if number == mount:
                    return device
        finally:
            os.close(mounts)
    return None


def is_sound(mounts: Mounts, kind: int, overlay: bytes | None) -> bool:
    """Whether reading a file of file system `kind` (f_type) waits for devices and root's servers
    alone. `overlay`: the device of an overlayfs."""
    if kind != OVERLAY_MAGIC:
        return kind not in WAITING
    return overlay is not None and mounts.type_of(overlay) == b"overlay"


def is_surely_sound(mounts: Mounts, handle: int, pid: int) -> bool:
    """The same of an O_PATH descriptor, without a call that the file system answers."""
    device = device_of(handle, pid)
    return device is not None and mounts.type_of(device) in SURE


def copy_of(fd: int, limit: int) -> int:
    """A memfd with the content of a file; pieces that are not zero take `limit` bytes at most.
    Raises OSError."""
    size = os.fstat(fd).st_size
    if size > MAX_COPIED_SIZE:
        raise OSError(errno.EFBIG, "too long to be copied")
    memory = os.memfd_create("sonde-copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    at = taken = 0
    try:
        os.ftruncate(memory, size)
        while (at := next_data(fd, at)) < size:
            piece = os.pread(fd, min(COPY_PIECE, size - at), at)
            if not piece:
                break
            if piece.count(0) < len(piece):
                taken += COPY_PIECE
                if taken > limit:
                    raise OSError(errno.EDQUOT, "no room for a copy")
                os.pwrite(memory, piece, at)
            at += len(piece)
    except BaseException:
        os.close(memory)
        raise
    return memory


def next_data(fd: int, at: int) -> int:
    """Offset of the next data of a file from `at` on (SEEK_DATA); `at` where the file system does
    not know, sys.maxsize behind the last."""
    try:
        return max(at, os.lseek(fd, at, os.SEEK_DATA))
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else at


def root_of(path: str) -> tuple[int, str]:
    """(pid, path below its root) of /proc/PID/root/…, (0, "") of another path, such as that of
    /proc/self."""
    parts = path.split("/", 4)
    is_root = len(parts) == 5 and parts[:2] == ["", "proc"] and parts[3] == "root"
    if is_root and parts[2].isascii() and parts[2].isdecimal():
        return int(parts[2]), parts[4].lstrip("/")
    return 0, ""


def sees_our_files(pid: int) -> bool:
    """Whether a process has the mount namespace and the root directory of this one, so that a path
    is the same to both. Not where it is gone."""
    if pid in (os.getpid(), os.getppid()):
        return True
    try:
        ours, its = (os.readlink(here(f"/proc/{who}/ns/mnt")) for who in ("self", pid))  # noqa: PTH115
        return ours == its and os.readlink(here(f"/proc/{pid}/root")) == "/"  # noqa: PTH115
    except PermissionError:
        return True  # without CAP_SYS_PTRACE: not known; `step` has nothing mounted for it either
    except OSError:
        return False


def hold(path: str, flags: int, who: int = 0) -> int:
    """An O_PATH descriptor of what a path leads to. `who`: the process that chose the path; 0: it
    may be walked like one of our own."""
    pid, below = root_of(path)
    if not pid and (path.startswith("/proc/") or path[:1] != "/"):
        return os.open(here(path), flags)
    top = f"/proc/{pid}/root" if pid else "/"
    root = os.open(here(top), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if pid or not who or sees_our_files(who):
            return hold_below(root, below if pid else path, flags)
        return open_below(root, path, flags, RESOLVE_IN_ROOT | RESOLVE_CACHED)
    finally:
        os.close(root)


def status_of(path: str, who: int = 0) -> tuple[os.stat_result, bool]:
    """stat() of what a path leads to, and whether every user of the machine can reach it by that
    path and read it, as the modes of the file and its folders have it; no, too, where that is not
    known. As `hold`. Raises OSError."""
    handle = hold(path, os.O_PATH | os.O_CLOEXEC, who)
    try:
        found = os.fstat(handle)
        is_readable = stat.S_ISREG(found.st_mode) and found.st_mode & READABLE == READABLE
        return found, is_readable and leads_everybody(path, handle, who)
    finally:
        os.close(handle)


def leads_everybody(path: str, handle: int, who: int) -> bool:
    """Whether every user can pass and list the folders of a path, which has led to `handle`.

    No, where a symbolic link is on the way. The kernel has these folders in memory now, so looking
    at them asks no disk or server that the look-up of the path has not asked.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if os.readlink(here(f"/proc/self/fd/{handle}")) != path:  # noqa: PTH115
            return False
        walks = not who or sees_our_files(who)
        held = os.open("/", flags)
        try:
            for name in (*path.split("/")[1:-1], ""):
                mode = os.fstat(held).st_mode
                if not stat.S_ISDIR(mode) or mode & LISTABLE != LISTABLE:
                    return False
                if name:
                    above = held
                    held = step(above, name, asks=walks)
                    os.close(above)
            return True
        finally:
            os.close(held)
    except OSError:
        return False


def hold_below(root: int, path: str, flags: int) -> int:
    """The same with `root` as the root directory: links lead below it, and magic links of /proc are
    refused."""
    try:
        return open_below(root, path, flags, RESOLVE_IN_ROOT | RESOLVE_CACHED)
    except OSError as error:
        if error.errno not in NOT_IN_MEMORY:
            raise
    return walk_below(root, path, flags)


def open_below(root: int, path: str, flags: int, resolve: int) -> int:
    """openat2(), which refuses magic links. Raises OSError: also NOT_IN_MEMORY."""
    import ctypes

    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("a null byte in a path")
    how = HOW.pack(flags, 0, resolve | RESOLVE_NO_MAGICLINKS)
    call = ctypes.CDLL(None, use_errno=True).syscall
    for _ in range(4):  # EAGAIN: perhaps something was renamed or mounted meanwhile
        fd: int = call(
            ctypes.c_long(OPENAT2), root, ctypes.c_char_p(name), how, ctypes.c_size_t(HOW.size)
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EAGAIN:
            break
    raise OSError(number, os.strerror(number), path)


def walk_below(root: int, path: str, flags: int) -> int:
    """The same as `hold_below`, one name after the other. It never asks the kernel for "..", which
    would lead out of a folder that was moved meanwhile."""
    parts = [*reversed(path.split("/"))]
    held = [os.dup(root)]
    links = 0
    try:
        while parts:
            name = parts.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(held) > 1:
                    os.close(held.pop())
                continue
            held.append(step(held[-1], name))
            is_final = bool(flags & os.O_NOFOLLOW) and not any(parts)
            link = None if is_final else link_at(held[-1])
            if link is None:
                continue
            links += 1
            if links > MAX_LINKS or file_system(held[-1]) == PROC_MAGIC:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            os.close(held.pop())
            if link.startswith("/"):
                while len(held) > 1:
                    os.close(held.pop())
            parts += reversed(link.split("/"))
        return held.pop()
    finally:
        for fd in held:
            os.close(fd)


def step(folder: int, name: str, asks: bool = True) -> int:
    """An O_PATH descriptor of what a folder has by a name, without a mount for it: as the last name
    of a path it is not mounted by the kernel, unless it is one that autofs makes for the lookup.
    So there only what is in memory counts, as mounts are. `asks`: whether a disk or a server may be
    asked."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return open_below(folder, name, flags, RESOLVE_CACHED)
    except OSError as error:
        if not asks or error.errno not in NOT_IN_MEMORY:
            raise
    if file_system(folder) == AUTOFS_MAGIC:
        raise OSError(errno.ENOENT, "not mounted", name)
    return os.open(name, flags, dir_fd=folder)


def link_at(handle: int) -> str | None:
    """Where an O_PATH descriptor of a symbolic link leads to; None of anything else."""
    try:
        return os.readlink("", dir_fd=handle)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ENOTDIR):
            return None
        raise


def open_file(
    mounts: Mounts, path: str, follow: bool, pid: int, inode: int, copy_bytes: int, sure: bool
) -> tuple[int, bool, tuple[int, int, int, int, int], bool, tuple[int, int, int] | None]:
    """(descriptor, is a copy, which file it is, whether mappings of it show another device,
    (major, minor, inode) that only this file has). `inode`: which it must have, 0: any;
    `copy_bytes`: memory for a copy, 0: none; `sure`: only a mapped file (map_files) for which even
    stat() and open() wait for nobody. Raises OSError."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    if path.startswith("/proc/") and (found_pid := path.split("/", 3)[2]).isdecimal():
        pid = int(found_pid)
    if sure and not path.startswith(f"/proc/{pid}/map_files/"):
        raise OSError(errno.ETIMEDOUT, "looking it up may wait")
    handle = hold(path, flags, pid)
    try:
        if sure and not is_surely_sound(mounts, handle, pid):
            raise OSError(errno.ETIMEDOUT, "it may wait")
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if inode and found.st_ino != inode:
            raise OSError(errno.ESTALE, "another file")
        fd = os.open(here(f"/proc/self/fd/{handle}"), OPENING)
    finally:
        os.close(handle)
    which = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    try:
        kind = file_system(fd)
        is_strange = kind in (OVERLAY_MAGIC, BTRFS_MAGIC)
        overlay = device_of(fd, pid, root_of(path)[0]) if kind == OVERLAY_MAGIC else None
        key = key_of(found, kind, overlay)
        if is_sound(mounts, kind, overlay):
            return fd, False, which, is_strange, key
        if not copy_bytes:
            raise OSError(errno.EXDEV, "somebody else can make reading it wait")
        memory = copy_of(fd, copy_bytes)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return memory, True, which, is_strange, key


def key_of(found: os.stat_result, kind: int, overlay: bytes | None) -> tuple[int, int, int] | None:
    """Device and inode. stat() of a file on overlayfs may show the device of a layer, with an inode
    that its maker chose: the mount's own device counts; None where that is not known."""
    if kind != OVERLAY_MAGIC:
        return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino
    if overlay is None:
        return None
    major, minor = overlay.split(b":")
    return int(major), int(minor), found.st_ino


def open_memory(path: str, device: int, size: int) -> int:
    """Open a memfd of this size to read and write it; `device`: of all memfds. Raises OSError."""
    handle = os.open(here(path), os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        is_memory = stat.S_ISREG(found.st_mode) and found.st_dev == device
        if not is_memory or found.st_nlink or found.st_size != size:
            raise OSError(errno.EINVAL, "no such memory")
        return os.open(here(f"/proc/self/fd/{handle}"), OPENING | os.O_RDWR)
    finally:
        os.close(handle)
