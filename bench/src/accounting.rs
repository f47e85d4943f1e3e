//! The clock of latencies, the CPU time of a thread, and the expense of a server process: CPU time
//! and wake-ups. The machine that a result comes from, and the command that made it.

use std::time::{Duration, SystemTime};
use std::{fmt, fs, io};

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

/// The facts that are needed to repeat a measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The command line.
    pub command: String,
    /// The commit that the command was built from, with `-dirty` if something was not committed;
    /// null if the commit is not known.
    pub commit: Option<String>,
    /// The time at which the result was complete, in UTC.
    pub date: String,
    /// The machine that it was measured on.
    pub machine: Machine,
}

impl Origin {
    /// The origin of a result that this process, which runs the command of this name, completes
    /// now.
    pub fn of(command: &str, machine: Machine) -> Self {
        let words: Vec<_> =
            std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        let words = std::iter::once(command).chain(words.iter().map(String::as_str));
        Self {
            // Joining fails only for a NUL, and no argument has one.
            command: shlex::try_join(words).unwrap_or_default(),
            commit: option_env!("FARSIDE_COMMIT").map(str::to_owned),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine,
        }
    }
}

/// The machine, as far as it matters to the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    kernel: String,
    pages: String,
}

impl Machine {
    /// Detects this machine. `huge_percent` is the share of the region that has pages of 2 MiB.
    pub fn detect(huge_percent: u64) -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let model = |line: &str| {
            Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned())
        };
        let processor = read("/proc/cpuinfo").lines().find_map(model);
        Self {
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            pages: format!("2 MiB pages ({huge_percent} %)"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, kernel, pages } = self;
        write!(f, "{processor}, {cores} cores, Linux {kernel}, region in {pages}")
    }
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

    #[test]
    fn a_result_says_where_it_comes_from() {
        let Origin { command, date, machine, .. } = Origin::of("kv-bench", Machine::detect(50));
        assert!(command.starts_with("kv-bench"), "{command}");
        assert!(humantime::parse_rfc3339(&date).is_ok(), "{date}");
        assert!(
            machine.cores > 0 && machine.to_string().ends_with("region in 2 MiB pages (50 %)"),
            "{machine}"
        );
    }
}
