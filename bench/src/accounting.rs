//! The clock of latencies, the CPU time of a thread, and the expense of a server process: CPU
//! time and wake-ups.

use std::fs;
use std::io;
use std::time::Duration;

use farside_control::address::Address;
use farside_fabric::shm::Connection;
use rustix::net::sockopt::socket_peercred;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// How long a server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The expense of a process since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerUsage {
    /// CPU time, in seconds, in kernel and user space.
    pub cpu_s: f64,
    /// How often its threads went to sleep: each sleep ends with a wake-up.
    pub wakeups: u64,
}

impl ServerUsage {
    /// The expense of the process with this number, from its start to this call.
    pub fn of(process: u32) -> io::Result<Self> {
        let cpu_s = cpu_s(&format!("/proc/{process}/stat"))?;
        let mut wakeups = 0;
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            // A thread may have ended since the folder was read.
            let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
            wakeups += voluntary_switches(&status).unwrap_or(0);
        }
        Ok(Self { cpu_s, wakeups })
    }

    /// The expense of both together.
    pub fn plus(self, other: Self) -> Self {
        Self { cpu_s: self.cpu_s + other.cpu_s, wakeups: self.wakeups + other.wakeups }
    }

    /// The expense since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            cpu_s: self.cpu_s - earlier.cpu_s,
            wakeups: self.wakeups.saturating_sub(earlier.wakeups),
        }
    }
}

/// The CPU time of this thread so far, in seconds.
pub fn thread_cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn cpu_s(stat: &str) -> io::Result<f64> {
    let ticks = cpu_ticks(&fs::read_to_string(stat)?).ok_or(io::ErrorKind::InvalidData)?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The sum of utime and stime. The name of the program, in parentheses, may contain anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn voluntary_switches(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// The process that listens at this address, if the address is a socket of this machine.
pub fn process_at(address: &str) -> Option<u32> {
    let Ok(Address::Shm(path)) = address.parse() else { return None };
    let connection = Connection::connect(&path, CONNECT_TIMEOUT).ok()?;
    let credentials = socket_peercred(&connection).ok()?;
    u32::try_from(credentials.pid.as_raw_nonzero().get()).ok()
}

/// Reads a monotonic clock, in nanoseconds. It returns a plain number, so that a difference costs
/// one subtraction.
#[inline]
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_waits_for_input_again_has_slept() {
        // A process of its own: threads of this one end at any time, and take their sleeps along.
        let mut cat = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("every system has cat");
        let before = ServerUsage::of(cat.id()).unwrap();
        let mut input = cat.stdin.take().unwrap();
        input.write_all(b"x").unwrap();
        cat.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        // There is nothing more to read, so it goes to sleep.
        while ServerUsage::of(cat.id()).unwrap().since(&before).wakeups == 0 {
            std::thread::yield_now();
        }

        drop(input);
        assert!(cat.wait().unwrap().success());
        assert!(ServerUsage::of(u32::MAX).is_err());
    }

    #[test]
    fn a_program_name_with_parentheses_is_skipped() {
        let stat = "7 (kv) 1 2 (server) S 1 7 7 0 -1 4194560 900 0 0 0 31 11 0 0 20 0 4 0 5";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("7 (kv"), None);
        assert_eq!(voluntary_switches("Name:\tx\nvoluntary_ctxt_switches:\t12\n"), Some(12));
    }
}
