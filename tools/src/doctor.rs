//! `doctor`: what this machine has for Farside, and what to do about what it lacks.

use std::fs;
use std::io::Write;
use std::path::Path;

use farside_config::ClientConfig;
use farside_config::command_line::{exit_code, one_line};
use farside_fabric::rdma::{Device, Finding, Report, preflight};
use farside_fabric::shm::collapse_refusal;
use farside_tools::encoding::printable;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, bytes, count};

/// Free memory below this is worth a word, in bytes.
const MEMORY_BYTES_WISHED: u64 = 1 << 30;

/// One thing that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    what: &'static str,
    is: String,
    /// What to do; `None` if all is well.
    cure: Option<String>,
}

impl Check {
    fn ok(what: &'static str, is: impl Into<String>) -> Self {
        Self { what, is: is.into(), cure: None }
    }

    fn warn(what: &'static str, is: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { what, is: is.into(), cure: Some(cure.into()) }
    }

    fn line(&self) -> String {
        let Self { what, is, cure } = self;
        // A path may hold any characters; those of several lines begin the next one here.
        let is = is.split('\n').map(printable).collect::<Vec<_>>().join("\n");
        match cure {
            None => format!("ok    {what:<14}{is}\n"),
            Some(cure) => format!("warn  {what:<14}{is}\n      {:<14}-> {cure}\n", ""),
        }
    }
}

/// `doctor`.
pub(crate) fn doctor(args: &Args) -> anyhow::Result<ExitStatus> {
    let machine = look();
    let mut stdout = output::stdout();
    let rdma = rdma(&preflight());
    let (configured, outcome) = configured(args);
    for check in examine(&machine).iter().chain(&rdma).chain(&configured) {
        stdout.write_all(check.line().as_bytes())?;
    }
    output::finish(stdout)?;
    // What the machine lacks is advice; what is configured has to work.
    Ok(outcome)
}

fn examine(machine: &Machine) -> [Check; 4] {
    [processors(machine), memory(machine), shared_memory(machine), huge_pages(machine)]
}

fn processors(machine: &Machine) -> Check {
    let is = count(machine.processors, "processor");
    match machine.processors {
        0 | 1 => {
            let cure = "server and clients share it; benchmarks here say little";
            Check::warn("processors", is, cure)
        }
        _ => Check::ok("processors", is),
    }
}

fn memory(machine: &Machine) -> Check {
    match machine.memory_available_bytes {
        None => Check::warn("memory", "unknown", "mount -t proc proc /proc"),
        Some(available) if available < MEMORY_BYTES_WISHED => {
            let is = format!("{} available", bytes(available));
            Check::warn("memory", is, "start kv-server with a --memory below that, as 256MiB")
        }
        Some(available) => Check::ok("memory", format!("{} available", bytes(available))),
    }
}

fn shared_memory(machine: &Machine) -> Check {
    let mend = "mount -o remount,size=50% /dev/shm (a region file there survives the server)";
    match machine.shm {
        None => Check::warn("/dev/shm", "not there", "mount -t tmpfs tmpfs /dev/shm"),
        Some((total, free)) => {
            let is = format!("{} free of {}", bytes(free), bytes(total));
            if free < MEMORY_BYTES_WISHED {
                Check::warn("/dev/shm", is, mend)
            } else {
                Check::ok("/dev/shm", is)
            }
        }
    }
}

/// What `huge_pages = "auto"` will do here.
fn huge_pages(machine: &Machine) -> Check {
    let what = "huge pages";
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
            let is =
                format!("{pool}; a region that they are not enough for gets 2 MiB pages anyway");
            Check::ok(what, is)
        }
        Some(refusal) if machine.huge_pages.as_ref().is_some_and(|pool| pool.free > 0) => {
            Check::ok(what, format!("{pool}; larger regions get 4 KiB pages ({refusal})"))
        }
        Some(refusal) => {
            let cure = "sysctl vm.nr_hugepages=512 (1 GiB with pages of 2 MiB), before kv-server \
                        starts";
            Check::warn(what, format!("{pool}, and none can be made: {refusal}"), cure)
        }
    }
}

/// What RDMA finds here: what each device can do, and what keeps connections from working.
fn rdma(report: &Report) -> Vec<Check> {
    let indent = format!("\n{:20}", "");
    let device =
        |device: &Device| Check::ok("RDMA device", device.to_string().replace('\n', &indent));
    let locked = report.memlock_suffices().then(|| {
        let is = report.memlock_bytes.map_or("no limit".to_owned(), bytes);
        Check::ok("locked memory", is)
    });
    let findings = report.findings.iter();
    let findings = findings.map(|Finding { what, mend }| Check::warn("RDMA", &**what, &**mend));
    report.devices.iter().map(device).chain(locked).chain(findings).collect()
}

/// The config file, and whether the server answers, if one is named.
fn configured(args: &Args) -> ([Check; 2], ExitStatus) {
    let file = config_file(args);
    if file.cure.is_some() {
        let server = Check::warn("server", "not asked", "mend the config file first");
        return ([file, server], ExitStatus::Failed(exit_code::USAGE));
    }
    let (server, outcome) = server(args);
    ([file, server], outcome)
}

fn config_file(args: &Args) -> Check {
    let what = "config file";
    let Some(path) = ClientConfig::file(args.config.as_deref()) else {
        return Check::ok(what, "none; --server and FARSIDE_SERVER do");
    };
    let name = path.display().to_string();
    match ClientConfig::load(&path) {
        Ok(_) => Check::ok(what, name),
        Err(error) => Check::warn(what, name, one_line(&error)),
    }
}

/// With a config file that is right, or none.
fn server(args: &Args) -> (Check, ExitStatus) {
    let what = "server";
    let Ok(config) = connect::config(args) else {
        let is = "none named; --server, FARSIDE_SERVER or a config file do";
        return (Check::ok(what, is), ExitStatus::Done);
    };
    let name = config.server.unwrap_or_default();
    match connect::reader(args).and_then(|client| Ok(client.statistics()?)) {
        Ok(_) => (Check::ok(what, format!("{name} answers")), ExitStatus::Done),
        Err(error) => {
            let outcome = ExitStatus::Failed(output::exit_code(&error));
            (Check::warn(what, name, one_line(error.as_ref())), outcome)
        }
    }
}

/// What a machine has. `None` for what could not be found out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    /// That this process may run on.
    pub(crate) processors: u64,
    pub(crate) memory_available_bytes: Option<u64>,
    /// Total and free bytes of `/dev/shm`.
    pub(crate) shm: Option<(u64, u64)>,
    pub(crate) huge_pages: Option<HugePages>,
    /// Why kv-server cannot make huge pages without a pool; `None` if it can.
    pub(crate) collapse_refusal: Option<String>,
}

/// The pool of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HugePages {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) page_bytes: u64,
}

/// Looks at this machine.
pub(crate) fn look() -> Machine {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Machine {
        processors: std::thread::available_parallelism().map_or(0, |count| count.get() as u64),
        memory_available_bytes: kib(&meminfo, "MemAvailable"),
        shm: shm(),
        huge_pages: huge_page_pool(&meminfo),
        collapse_refusal: collapse_refusal(),
    }
}

fn shm() -> Option<(u64, u64)> {
    let folder = Path::new("/dev/shm");
    if !folder.is_dir() {
        return None;
    }
    let space = rustix::fs::statvfs(folder).ok()?;
    Some((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))
}

fn huge_page_pool(meminfo: &str) -> Option<HugePages> {
    Some(HugePages {
        total: number(meminfo, "HugePages_Total")?,
        free: number(meminfo, "HugePages_Free")?,
        page_bytes: kib(meminfo, "Hugepagesize")?,
    })
}

/// A number of `/proc/meminfo`.
fn number(meminfo: &str, name: &str) -> Option<u64> {
    let value = |line: &str| {
        let value = line.strip_prefix(name)?.strip_prefix(':')?.trim_start();
        value.split(' ').next()?.parse().ok()
    };
    meminfo.lines().find_map(value)
}

fn kib(meminfo: &str, name: &str) -> Option<u64> {
    number(meminfo, name)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            processors: 8,
            memory_available_bytes: Some(8 << 30),
            shm: Some((8 << 30, 4 << 30)),
            huge_pages: Some(HugePages { total: 512, free: 512, page_bytes: 2 << 20 }),
            collapse_refusal: None,
        }
    }

    #[test]
    fn devices_are_told_with_what_is_wrong() {
        let told = |report: &Report| -> String { rdma(report).iter().map(Check::line).collect() };
        assert_eq!(told(&Report::default()), "ok    locked memory no limit\n");
        let device = Device { name: "rxe0".into(), ports: Vec::new(), capabilities: None };
        let found = Finding { what: "port 1 is down".into(), mend: "ip link set eth0 up".into() };
        let (devices, findings) = (vec![device], vec![found]);
        let lines = told(&Report { devices, findings, memlock_bytes: Some(1 << 20) });
        assert!(lines.starts_with("ok    RDMA device   rxe0:"), "{lines}");
        assert!(lines.contains("port 1 is down\n") && lines.contains("-> ip link"), "{lines}");
        assert!(!lines.contains("locked memory"), "that is for a finding to tell: {lines}");
    }

    #[test]
    fn a_machine_that_has_everything_gets_no_advice() {
        let checks = examine(&machine());
        assert!(checks.iter().all(|check| check.cure.is_none()), "{checks:?}");
    }

    #[test]
    fn huge_pages_need_a_pool_or_a_kernel_that_makes_them() {
        let of = |total: u64, refusal: Option<&str>| {
            let pool = HugePages { total, free: total, page_bytes: 2 << 20 };
            let collapse_refusal = refusal.map(str::to_owned);
            let huge_pages = Some(pool);
            super::huge_pages(&Machine { huge_pages, collapse_refusal, ..machine() })
        };
        assert!(of(0, None).line().starts_with("ok    huge pages    none in the pool; a region"));
        assert!(of(4, Some("refused")).line().contains("4 free of 4 in the pool, 2.0 MiB each"));
        let lacking = of(0, Some("refused")).line();
        assert!(lacking.starts_with("warn") && lacking.contains("none can be made: refused"));
        assert!(lacking.contains("-> sysctl vm.nr_hugepages="), "{lacking}");
    }

    #[test]
    fn a_machine_that_has_nothing_is_told_a_cure_for_each() {
        let collapse_refusal = Some("the kernel refuses".into());
        let bare = Machine { processors: 1, collapse_refusal, ..Machine::default() };
        let checks = examine(&bare);
        assert!(checks.iter().all(|check| check.cure.is_some()), "{checks:?}");
        assert!(checks.iter().all(|check| check.line().starts_with("warn")));
    }

    #[test]
    fn meminfo_is_understood() {
        let meminfo = "MemTotal:       100 kB\nMemAvailable:    50 kB\n\
            HugePages_Total:       4\nHugePages_Free:        3\nHugepagesize:       2048 kB\n";
        assert_eq!(kib(meminfo, "MemAvailable"), Some(50 << 10));
        let pool = HugePages { total: 4, free: 3, page_bytes: 2 << 20 };
        assert_eq!(huge_page_pool(meminfo), Some(pool));
        assert_eq!(huge_page_pool("MemTotal: x kB"), None);
    }

    #[test]
    fn looking_at_any_machine_works() {
        assert!(look().processors > 0);
    }
}
