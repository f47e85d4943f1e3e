//! `doctor`: what this machine has for Farside, and what to do about what it lacks.

use std::io::Write;

use farside_config::ClientConfig;
use farside_config::command_line::{exit_code, one_line};
use farside_fabric::rdma::{Device, Report, preflight};
use farside_tools::encoding::printable;

use crate::args::Args;
use crate::connect;
use crate::output::{self, Outcome, bytes, count};
use crate::system::{self, Machine};

/// Free memory below this is worth a word, in bytes.
const MEMORY_BYTES_WISHED: u64 = 1 << 30;
/// Locked memory below this is too little for any region, in bytes.
const LOCKED_BYTES_WISHED: u64 = 1 << 30;

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    what: &'static str,
    is: String,
    /// What to do; `None` if all is well.
    cure: Option<String>,
}

impl Finding {
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
pub(crate) fn doctor(args: &Args) -> anyhow::Result<Outcome> {
    let machine = system::look();
    let mut stdout = output::stdout();
    let rdma = rdma_details(&preflight());
    let (configured, outcome) = configured(args);
    for finding in examine(&machine).iter().chain(&rdma).chain(&configured) {
        stdout.write_all(finding.line().as_bytes())?;
    }
    output::finish(stdout)?;
    // What the machine lacks is advice; what is configured has to work.
    Ok(outcome)
}

fn examine(machine: &Machine) -> Vec<Finding> {
    vec![
        processors(machine),
        memory(machine),
        shared_memory(machine),
        huge_pages(machine),
        locked_memory(machine),
        rdma_devices(machine),
        rdma_access(machine),
    ]
}

fn processors(machine: &Machine) -> Finding {
    let is = count(machine.processors, "processor");
    match machine.processors {
        0 | 1 => {
            let cure = "server and clients share it; benchmarks here say little";
            Finding::warn("processors", is, cure)
        }
        _ => Finding::ok("processors", is),
    }
}

fn memory(machine: &Machine) -> Finding {
    match machine.memory_available_bytes {
        None => Finding::warn("memory", "unknown", "mount -t proc proc /proc"),
        Some(available) if available < MEMORY_BYTES_WISHED => {
            let is = format!("{} available", bytes(available));
            Finding::warn("memory", is, "start kv-server with a --memory below that, as 256MiB")
        }
        Some(available) => Finding::ok("memory", format!("{} available", bytes(available))),
    }
}

fn shared_memory(machine: &Machine) -> Finding {
    let mend = "mount -o remount,size=50% /dev/shm (a region file there survives the server)";
    match machine.shm {
        None => Finding::warn("/dev/shm", "not there", "mount -t tmpfs tmpfs /dev/shm"),
        Some((total, free)) => {
            let is = format!("{} free of {}", bytes(free), bytes(total));
            if free < MEMORY_BYTES_WISHED {
                Finding::warn("/dev/shm", is, mend)
            } else {
                Finding::ok("/dev/shm", is)
            }
        }
    }
}

/// What `huge_pages = "auto"` will do here.
fn huge_pages(machine: &Machine) -> Finding {
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
            Finding::ok(what, is)
        }
        Some(refusal) if machine.huge_pages.as_ref().is_some_and(|pool| pool.free > 0) => {
            Finding::ok(what, format!("{pool}; larger regions get 4 KiB pages ({refusal})"))
        }
        Some(refusal) => {
            let cure = "sysctl vm.nr_hugepages=512 (1 GiB with pages of 2 MiB), before kv-server \
                        starts";
            Finding::warn(what, format!("{pool}, and none can be made: {refusal}"), cure)
        }
    }
}

fn locked_memory(machine: &Machine) -> Finding {
    let what = "locked memory";
    match machine.locked_bytes_max {
        None => Finding::ok(what, "no limit"),
        Some(limit) if limit >= LOCKED_BYTES_WISHED => Finding::ok(what, bytes(limit)),
        Some(limit) => {
            let is = format!("at most {}; RDMA has to lock the region", bytes(limit));
            let cure = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit \
                        (shm:// does not need it)";
            Finding::warn(what, is, cure)
        }
    }
}

fn rdma_devices(machine: &Machine) -> Finding {
    let what = "RDMA devices";
    if machine.rdma_devices.is_empty() {
        let cure = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0 (soft-RoCE; \
                    shm:// needs none)";
        return Finding::warn(what, "none", cure);
    }
    Finding::ok(what, machine.rdma_devices.join(", "))
}

/// What each device can do, and what keeps connections from working. Without a device the lines
/// above say it all.
fn rdma_details(report: &Report) -> Vec<Finding> {
    if report.devices.is_empty() {
        return Vec::new();
    }
    let indent = format!("\n{:20}", "");
    let device =
        |device: &Device| Finding::ok("RDMA device", device.to_string().replace('\n', &indent));
    let findings = report.findings.iter();
    let findings = findings.map(|found| Finding::warn("RDMA", &*found.what, &*found.mend));
    report.devices.iter().map(device).chain(findings).collect()
}

fn rdma_access(machine: &Machine) -> Finding {
    let what = "RDMA access";
    if machine.verbs_devices.is_empty() {
        let cure = "modprobe ib_uverbs rdma_ucm (in a container: pass /dev/infiniband in; shm:// \
                    needs neither)";
        return Finding::warn(what, "no /dev/infiniband/uverbs*", cure);
    }
    let is = machine.verbs_devices.join(", ");
    if machine.verbs_devices_open {
        return Finding::ok(what, is);
    }
    Finding::warn(what, format!("{is}, but not for this user"), "usermod -aG rdma $USER")
}

/// The config file, and whether the server answers, if one is named.
fn configured(args: &Args) -> ([Finding; 2], Outcome) {
    let file = config_file(args);
    if file.cure.is_some() {
        let server = Finding::warn("server", "not asked", "mend the config file first");
        return ([file, server], Outcome::Failed(exit_code::USAGE));
    }
    let (server, outcome) = server(args);
    ([file, server], outcome)
}

fn config_file(args: &Args) -> Finding {
    let what = "config file";
    let Some(path) = ClientConfig::file(args.config.as_deref()) else {
        return Finding::ok(what, "none; --server and FARSIDE_SERVER do");
    };
    let name = path.display().to_string();
    match ClientConfig::load(&path) {
        Ok(_) => Finding::ok(what, name),
        Err(error) => Finding::warn(what, name, one_line(&error)),
    }
}

/// With a config file that is right, or none.
fn server(args: &Args) -> (Finding, Outcome) {
    let what = "server";
    let Ok(config) = connect::config(args) else {
        let is = "none named; --server, FARSIDE_SERVER or a config file do";
        return (Finding::ok(what, is), Outcome::Done);
    };
    let name = config.server.unwrap_or_default();
    match connect::reader(args).and_then(|client| Ok(client.statistics()?)) {
        Ok(_) => (Finding::ok(what, format!("{name} answers")), Outcome::Done),
        Err(error) => {
            let outcome = Outcome::Failed(output::exit_code(&error));
            (Finding::warn(what, name, one_line(error.as_ref())), outcome)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::HugePages;

    fn machine() -> Machine {
        Machine {
            processors: 8,
            memory_available_bytes: Some(8 << 30),
            shm: Some((8 << 30, 4 << 30)),
            huge_pages: Some(HugePages { total: 512, free: 512, page_bytes: 2 << 20 }),
            collapse_refusal: None,
            locked_bytes_max: None,
            rdma_devices: vec!["mlx5_0".into()],
            verbs_devices: vec!["uverbs0".into()],
            verbs_devices_open: true,
        }
    }

    #[test]
    fn devices_are_told_with_what_is_wrong() {
        assert!(rdma_details(&Report::default()).is_empty());
        let device = Device { name: "rxe0".into(), ports: Vec::new(), capabilities: None };
        let found = farside_fabric::rdma::Finding {
            what: "port 1 is down".into(),
            mend: "ip link set eth0 up".into(),
        };
        let report = Report { devices: vec![device], findings: vec![found], ..Default::default() };
        let lines: String = rdma_details(&report).iter().map(Finding::line).collect();
        assert!(lines.contains("ok    RDMA device   rxe0:"), "{lines}");
        assert!(lines.contains("port 1 is down\n") && lines.contains("-> ip link"), "{lines}");
    }

    #[test]
    fn a_machine_that_has_everything_gets_no_advice() {
        let findings = examine(&machine());
        assert!(findings.iter().all(|finding| finding.cure.is_none()), "{findings:?}");
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
        let bare = Machine { processors: 1, ..Machine::default() };
        let collapse_refusal = Some("the kernel refuses".into());
        let bare = Machine { locked_bytes_max: Some(64 << 10), collapse_refusal, ..bare };
        let findings = examine(&bare);
        assert!(findings.iter().all(|finding| finding.cure.is_some()), "{findings:?}");
        assert!(findings.iter().all(|finding| finding.line().starts_with("warn")));
    }
}
