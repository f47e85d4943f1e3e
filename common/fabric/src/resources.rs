//! What this process may use: what the machine has, and what the limits of its cgroups leave.
//!
//! A container sees the memory of its host in `/proc/meminfo`. Its limit is that of a cgroup, of
//! version 1 or 2, or of one above it. If a process exceeds one, the kernel kills it silently.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Limits from here on are none: version 1 has the largest number of pages.
const NO_LIMIT: u64 = 1 << 60;

/// What the limit of a cgroup leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// What is left: bytes, or threads.
    pub left: u64,
    /// The file with the limit.
    pub limit: PathBuf,
}

/// The content of `/proc/meminfo`.
pub struct Meminfo(String);

impl Meminfo {
    /// Reads it.
    ///
    /// # Errors
    /// The system's error.
    pub fn read() -> io::Result<Self> {
        fs::read_to_string("/proc/meminfo").map(Self)
    }

    /// A number of this text.
    pub fn number(&self, name: &str) -> Option<u64> {
        let value = |line: &str| {
            let value = line.strip_prefix(name)?.strip_prefix(':')?.trim_start();
            value.split(' ').next()?.parse().ok()
        };
        self.0.lines().find_map(value)
    }

    /// A number of KiB of this text, in bytes.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.number(name)?.checked_mul(1024)
    }
}

/// Returns the bytes of memory that the machine has for this process, and the cgroup whose limit is
/// the reason, if one is. `None` if the system does not tell.
pub fn available_memory() -> Option<(u64, Option<Room>)> {
    let of_machine = Meminfo::read().ok()?.bytes("MemAvailable")?;
    let of_cgroup = memory_room().filter(|room| room.left < of_machine);
    Some((of_cgroup.as_ref().map_or(of_machine, |room| room.left), of_cgroup))
}

/// Returns the memory that the cgroups of this process leave, if they limit it. The kernel frees
/// the files that it keeps in memory before it kills a process, so they are not counted.
pub fn memory_room() -> Option<Room> {
    memory_room_of(Path::new("/proc/self"))
}

/// Returns the number of threads that the cgroups of this process leave, if they limit it.
pub fn threads_room() -> Option<Room> {
    threads_room_of(Path::new("/proc/self"))
}

fn memory_room_of(process: &Path) -> Option<Room> {
    least_room(process, "memory", |cgroup, is_v2| {
        let files = if is_v2 {
            ["memory.max", "memory.current", "inactive_file", "active_file"]
        } else {
            let [inactive, active] = ["total_inactive_file", "total_active_file"];
            ["memory.limit_in_bytes", "memory.usage_in_bytes", inactive, active]
        };
        let [limit, used, kept @ ..] = files;
        let statistics = fs::read_to_string(cgroup.join("memory.stat")).unwrap_or_default();
        let kept = kept.into_iter().filter_map(|name| statistic(&statistics, name));
        room(cgroup.join(limit), number(&cgroup.join(used))?.saturating_sub(kept.sum::<u64>()))
    })
}

fn threads_room_of(process: &Path) -> Option<Room> {
    least_room(process, "pids", |cgroup, _| {
        room(cgroup.join("pids.max"), number(&cgroup.join("pids.current"))?)
    })
}

/// What a limit leaves if so much is in use.
fn room(limit: PathBuf, used: u64) -> Option<Room> {
    // The text "max", or a huge number, is no limit.
    let max = number(&limit).filter(|max| *max < NO_LIMIT)?;
    Some(Room { left: max.saturating_sub(used), limit })
}

/// The least room of the cgroups of a process that have this controller, up to the root.
fn least_room(
    process: &Path,
    controller: &str,
    room_of: impl Fn(&Path, bool) -> Option<Room>,
) -> Option<Room> {
    let cgroups = fs::read_to_string(process.join("cgroup")).ok()?;
    let mounts = fs::read_to_string(process.join("mountinfo")).ok()?;
    let paths = cgroups.lines().filter_map(|line| cgroup_with(line, controller));
    let rooms = paths.flat_map(|(path, is_v2)| {
        let found = mounts.lines().find_map(|line| mount_with(line, controller, is_v2));
        let (root, mounted_at) = found.unwrap_or_default();
        // Where the mount does not reach the cgroup, it shows the nearest one above.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let levels = below.ancestors().map(move |level| Path::new(mounted_at).join(level));
        levels.filter_map(|level| room_of(&level, is_v2)).collect::<Vec<_>>()
    });
    rooms.min_by_key(|room| room.left)
}

/// The path of a cgroup in a line of `/proc/PID/cgroup`, if it can have this controller, and
/// whether it is one of version 2.
fn cgroup_with<'l>(line: &'l str, controller: &str) -> Option<(&'l str, bool)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let is_v2 = controllers.is_empty();
    (is_v2 || controllers.split(',').any(|it| it == controller)).then_some((path, is_v2))
}

/// The root and the place of a mount in a line of `/proc/PID/mountinfo`, if cgroups with this
/// controller are there.
fn mount_with<'l>(line: &'l str, controller: &str, is_v2: bool) -> Option<(&'l str, &'l str)> {
    let (place, kind) = line.split_once(" - ")?;
    let (mut place, mut kind) = (place.split(' ').skip(3), kind.split(' '));
    let is_wanted = match (kind.next()?, is_v2) {
        ("cgroup2", true) => true,
        ("cgroup", false) => kind.nth(1)?.split(',').any(|it| it == controller),
        _ => false,
    };
    is_wanted.then_some((place.next()?, place.next()?))
}

fn statistic(statistics: &str, name: &str) -> Option<u64> {
    let mut lines = statistics.lines();
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests;
