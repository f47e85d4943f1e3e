//! `doctor`: checks this machine for what Farside needs, and says how to fix what is missing.

#[cfg(feature = "verbs")]
mod write_rate;

use std::io::Write;
use std::path::Path;

use farside_cli::formats::printable;
use farside_config::ClientConfig;
use farside_config::command_line::{exit_code, one_line};
use farside_config::size::ByteSize;
use farside_fabric::memory::collapse_refusal;
use farside_fabric::rdma::{Device, Finding, Report, preflight};
use farside_fabric::resources::{self, Meminfo, Room};

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, bytes, count};

/// The subject of the check that measures.
const WRITE_RATE: &str = "WRITE rate";
/// Less free memory than this gets a warning, in bytes.
const MEMORY_BYTES_RECOMMENDED: u64 = 1 << 30;
/// Less threads than this that may be started get a warning. A server has up to a dozen.
const THREADS_RECOMMENDED: u64 = 32;

/// The result of one check: what was checked, what was found, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    subject: &'static str,
    found: String,
    /// How to fix the problem; `None` if there is none.
    remedy: Option<String>,
}

impl Check {
    fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, found: found.into(), remedy: None }
    }

    fn warn(subject: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { subject, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn line(&self) -> String {
        let Self { subject, found, remedy } = self;
        // A path may have any characters. Line feeds stay: a device is shown on several lines.
        let found = found.split('\n').map(printable).collect::<Vec<_>>().join("\n");
        match remedy {
            None => format!("ok    {subject:<14}{found}\n"),
            Some(remedy) => format!("warn  {subject:<14}{found}\n      {:<14}-> {remedy}\n", ""),
        }
    }
}

/// `doctor`.
pub(crate) fn doctor(args: &Args, measured: Option<ByteSize>) -> anyhow::Result<ExitStatus> {
    let machine = inspect_machine();
    let mut stdout = output::stdout();
    let report = preflight();
    let rdma = rdma(&report);
    let (configured, outcome) = configured(args);
    for check in examine(&machine).iter().chain(&threads(&machine)).chain(&rdma).chain(&configured)
    {
        stdout.write_all(check.line().as_bytes())?;
    }
    if let Some(ByteSize(region_bytes)) = measured {
        // It takes seconds, so the other lines come first.
        stdout.flush()?;
        let check = measure(&report, region_bytes, machine.memory_available_bytes);
        stdout.write_all(check.line().as_bytes())?;
    }
    output::finish(stdout)?;
    // What the machine lacks is only advice. A config file or server that fails is an error.
    Ok(outcome)
}

#[cfg(feature = "verbs")]
use write_rate::measure;

/// Measures nothing in a build without RDMA.
#[cfg(not(feature = "verbs"))]
fn measure(_: &Report, _: u64, _: Option<u64>) -> Check {
    let found = "not measured: this program was built without RDMA";
    Check::warn(WRITE_RATE, found, "build it with --features verbs")
}

fn examine(machine: &Machine) -> [Check; 4] {
    [processors(machine), memory(machine), shared_memory(machine), huge_pages(machine)]
}

fn processors(machine: &Machine) -> Check {
    let found = count(machine.processors, "processor");
    match machine.processors {
        0 | 1 => {
            let remedy =
                "run benchmarks on two processors or more: here server and clients share one";
            Check::warn("processors", found, remedy)
        }
        _ => Check::ok("processors", found),
    }
}

fn memory(machine: &Machine) -> Check {
    let Some(available) = machine.memory_available_bytes else {
        return Check::warn("memory", "unknown", "mount -t proc proc /proc");
    };
    let found = match &machine.memory_limit {
        None => format!("{} available", bytes(available)),
        Some(Room { limit, .. }) => {
            format!("{} available, by the limit in {}", bytes(available), limit.display())
        }
    };
    if available >= MEMORY_BYTES_RECOMMENDED {
        return Check::ok("memory", found);
    }
    let remedy = "start kv-server with less --memory than that, such as 256MiB";
    Check::warn("memory", found, remedy)
}

/// Checks whether servers and clients may start threads. `None` without a limit.
fn threads(machine: &Machine) -> Option<Check> {
    let Room { left, limit } = machine.threads_limit.as_ref()?;
    let found = format!("{left} more, by the limit in {}", limit.display());
    Some(if *left < THREADS_RECOMMENDED {
        let remedy = "raise the limit (docker: --pids-limit, systemd: TasksMax)";
        Check::warn("threads", found, remedy)
    } else {
        Check::ok("threads", found)
    })
}

fn shared_memory(machine: &Machine) -> Check {
    let remedy = "mount -o remount,size=50% /dev/shm (a region file there survives the server)";
    match machine.shm {
        None => Check::warn("/dev/shm", "missing", "mount -t tmpfs tmpfs /dev/shm"),
        Some((total, free)) => {
            let found = format!("{} free of {}", bytes(free), bytes(total));
            if free < MEMORY_BYTES_RECOMMENDED {
                Check::warn("/dev/shm", found, remedy)
            } else {
                Check::ok("/dev/shm", found)
            }
        }
    }
}

/// Checks which pages a server with `huge_pages = "auto"` gets here.
fn huge_pages(machine: &Machine) -> Check {
    let subject = "huge pages";
    let pool = match &machine.huge_pages {
        None => "no pool".to_owned(),
        Some(pool) if pool.total == 0 => "none in the pool".to_owned(),
        Some(pool) => {
            let page = bytes(pool.page_bytes);
            format!("{} free of {} in the pool, {page} each", pool.free, pool.total)
        }
    };
    match &machine.collapse_refusal {
        None => {
            let found =
                format!("{pool}; without the pool a region gets 2 MiB pages of ordinary memory");
            Check::ok(subject, found)
        }
        Some(refusal) if machine.huge_pages.as_ref().is_some_and(|pool| pool.free > 0) => {
            Check::ok(subject, format!("{pool}; larger regions get 4 KiB pages ({refusal})"))
        }
        Some(refusal) => {
            let remedy = "sysctl vm.nr_hugepages=512 (1 GiB with pages of 2 MiB), before kv-server \
                        starts";
            Check::warn(subject, format!("{pool}, and none can be made: {refusal}"), remedy)
        }
    }
}

/// Lists what each RDMA device can do, and what would keep connections from working.
fn rdma(report: &Report) -> Vec<Check> {
    let indent = format!("\n{:20}", "");
    let device =
        |device: &Device| Check::ok("RDMA device", device.to_string().replace('\n', &indent));
    let locked = report.memlock_suffices().then(|| {
        let found = report.memlock_bytes.map_or("no limit".to_owned(), bytes);
        Check::ok("locked memory", found)
    });
    let findings = report.findings.iter();
    let findings = findings.map(|Finding { what, mend }| Check::warn("RDMA", &**what, &**mend));
    report.devices.iter().map(device).chain(locked).chain(findings).collect()
}

/// Checks the config file, and whether the configured server answers.
fn configured(args: &Args) -> ([Check; 2], ExitStatus) {
    let file = config_file(args);
    if file.remedy.is_some() {
        let server = Check::warn("server", "not checked", "fix the config file first");
        return ([file, server], ExitStatus::Failed(exit_code::USAGE));
    }
    let (server, outcome) = server(args);
    ([file, server], outcome)
}

fn config_file(args: &Args) -> Check {
    let subject = "config file";
    let Some(path) = ClientConfig::file(args.config.as_deref()) else {
        return Check::ok(subject, "none; --server or FARSIDE_SERVER is enough");
    };
    let name = path.display().to_string();
    match ClientConfig::load(&path) {
        Ok(_) => Check::ok(subject, name),
        Err(error) => Check::warn(subject, name, one_line(&error)),
    }
}

/// Checks whether the configured server answers. The config file must be valid, or absent.
fn server(args: &Args) -> (Check, ExitStatus) {
    let subject = "server";
    let Ok(config) = connect::config(args) else {
        let found = "none configured; use --server, FARSIDE_SERVER or a config file";
        return (Check::ok(subject, found), ExitStatus::Done);
    };
    let name = config.server.unwrap_or_default();
    match connect::reader(args).and_then(|client| Ok(client.admin().statistics()?)) {
        Ok(_) => (Check::ok(subject, format!("{name} answers")), ExitStatus::Done),
        Err(error) => {
            let outcome = ExitStatus::Failed(output::exit_code(&error));
            (Check::warn(subject, name, one_line(error.as_ref())), outcome)
        }
    }
}

/// The machine's resources. A field is `None` if the system does not report it.
#[derive(Clone, Debug, Default)]
struct Machine {
    /// The number of processors that this process may run on.
    processors: u64,
    memory_available_bytes: Option<u64>,
    /// The limit that makes the available memory less than the machine's.
    memory_limit: Option<Room>,
    /// The limit on threads, if there is one.
    threads_limit: Option<Room>,
    /// Total and free bytes of `/dev/shm`.
    shm: Option<(u64, u64)>,
    huge_pages: Option<HugePages>,
    /// Why kv-server cannot make huge pages without a pool; `None` if it can.
    collapse_refusal: Option<String>,
}

/// The pool of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HugePages {
    total: u64,
    free: u64,
    page_bytes: u64,
}

/// Reads what this machine has from the system.
fn inspect_machine() -> Machine {
    let available = resources::available_memory();
    let (bytes, memory_limit) = available.map_or((None, None), |(bytes, room)| (Some(bytes), room));
    Machine {
        processors: std::thread::available_parallelism().map_or(0, |count| count.get() as u64),
        memory_available_bytes: bytes,
        memory_limit,
        threads_limit: resources::threads_room(),
        shm: shm_space(),
        huge_pages: Meminfo::read().ok().as_ref().and_then(huge_page_pool),
        collapse_refusal: collapse_refusal(),
    }
}

/// Returns the total and free bytes of `/dev/shm`.
fn shm_space() -> Option<(u64, u64)> {
    let folder = Path::new("/dev/shm");
    if !folder.is_dir() {
        return None;
    }
    let space = rustix::fs::statvfs(folder).ok()?;
    Some((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))
}

fn huge_page_pool(meminfo: &Meminfo) -> Option<HugePages> {
    Some(HugePages {
        total: meminfo.number("HugePages_Total")?,
        free: meminfo.number("HugePages_Free")?,
        page_bytes: meminfo.bytes("Hugepagesize")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            processors: 8,
            memory_available_bytes: Some(8 << 30),
            memory_limit: None,
            threads_limit: None,
            shm: Some((8 << 30, 4 << 30)),
            huge_pages: Some(HugePages { total: 512, free: 512, page_bytes: 2 << 20 }),
            collapse_refusal: None,
        }
    }

    #[test]
    fn devices_are_listed_with_their_problems() {
        let lines_of =
            |report: &Report| -> String { rdma(report).iter().map(Check::line).collect() };
        assert_eq!(lines_of(&Report::default()), "ok    locked memory no limit\n");
        let device = Device { name: "rxe0".into(), ports: Vec::new(), capabilities: None };
        let found = Finding { what: "port 1 is down".into(), mend: "ip link set eth0 up".into() };
        let (devices, findings) = (vec![device], vec![found]);
        let lines = lines_of(&Report { devices, findings, memlock_bytes: Some(1 << 20) });
        assert!(lines.starts_with("ok    RDMA device   rxe0:"), "{lines}");
        assert!(lines.contains("port 1 is down\n") && lines.contains("-> ip link"), "{lines}");
        assert!(!lines.contains("locked memory"), "its finding reports that: {lines}");
    }

    #[test]
    fn a_machine_that_has_everything_gets_no_advice() {
        let checks = examine(&machine());
        assert!(checks.iter().all(|check| check.remedy.is_none()), "{checks:?}");
    }

    #[test]
    fn huge_pages_need_a_pool_or_a_kernel_that_makes_them() {
        let check = |total: u64, refusal: Option<&str>| {
            let pool = HugePages { total, free: total, page_bytes: 2 << 20 };
            let collapse_refusal = refusal.map(str::to_owned);
            let huge_pages = Some(pool);
            super::huge_pages(&Machine { huge_pages, collapse_refusal, ..machine() })
        };
        assert!(
            check(0, None)
                .line()
                .starts_with("ok    huge pages    none in the pool; without the pool")
        );
        assert!(check(4, Some("refused")).line().contains("4 free of 4 in the pool, 2.0 MiB each"));
        let lacking = check(0, Some("refused")).line();
        assert!(lacking.starts_with("warn") && lacking.contains("none can be made: refused"));
        assert!(lacking.contains("-> sysctl vm.nr_hugepages="), "{lacking}");
    }

    #[test]
    fn a_machine_that_has_nothing_gets_a_remedy_for_each_check() {
        let collapse_refusal = Some("the kernel refuses".into());
        let bare = Machine { processors: 1, collapse_refusal, ..Machine::default() };
        let checks = examine(&bare);
        assert!(checks.iter().all(|check| check.remedy.is_some()), "{checks:?}");
        assert!(checks.iter().all(|check| check.line().starts_with("warn")));
    }

    #[test]
    fn limits_of_cgroups_are_named() {
        let room = |left, limit: &str| Some(Room { left, limit: limit.into() });
        let (memory_limit, threads_limit) = (room(1 << 28, "/cg/memory.max"), room(9, "/cg/pids"));
        let memory_available_bytes = Some(1 << 28);
        let limited = Machine { memory_available_bytes, memory_limit, threads_limit, ..machine() };
        assert_eq!(
            memory(&limited).line(),
            "warn  memory        256.0 MiB available, by the limit in /cg/memory.max\n\
             \x20                   -> start kv-server with less --memory than that, such as \
             256MiB\n"
        );
        assert_eq!(
            threads(&limited).unwrap().line(),
            "warn  threads       9 more, by the limit in /cg/pids\n\
             \x20                   -> raise the limit (docker: --pids-limit, systemd: TasksMax)\n"
        );
        assert_eq!(threads(&machine()), None);
    }

    #[test]
    fn this_machine_can_be_inspected() {
        assert!(inspect_machine().processors > 0);
    }
}
