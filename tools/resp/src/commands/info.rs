//! INFO, and the lines of CLIENT LIST.

use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use farside_resp::ReplyWriter;
use rustix::param::clock_ticks_per_second;

use super::arguments::Arguments;
use super::table::COMMANDS;
use crate::gateway::{ClientRecord, Gateway};

/// The version of redis whose answers the gateway gives. Clients derive from it what they may use.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

/// The sections, in their order.
const SECTIONS: [&str; 8] =
    ["server", "clients", "memory", "stats", "replication", "cpu", "cluster", "keyspace"];

/// INFO, for all sections or those that are named.
pub(crate) fn info(arguments: &impl Arguments, gateway: &Gateway, reply: &mut ReplyWriter<'_>) {
    let is_wanted = |section: &str| {
        arguments.count() == 1
            || (1..arguments.count()).any(|at| {
                ["default", "all", "everything", section].iter().any(|w| arguments.is(at, w))
            })
    };
    let mut text = String::new();
    for section in SECTIONS.into_iter().filter(|section| is_wanted(section)) {
        if !text.is_empty() {
            text.push_str("\r\n");
        }
        let mut name = section.to_owned();
        name[..1].make_ascii_uppercase();
        // A string has room for everything; so below.
        let _ = write!(text, "# {name}\r\n");
        for (key, value) in entries(section, gateway) {
            let _ = write!(text, "{key}:{value}\r\n");
        }
    }
    reply.verbatim(&text);
}

fn entries(section: &str, gateway: &Gateway) -> Vec<(&'static str, String)> {
    let uptime = gateway.started.elapsed().as_secs();
    let (counts, figures) = (&gateway.counts, gateway.figures());
    match section {
        "server" => vec![
            ("redis_version", REDIS_VERSION.into()),
            ("redis_mode", "standalone".into()),
            ("farside_version", env!("CARGO_PKG_VERSION").into()),
            ("farside_server", gateway.server.clone()),
            ("os", "Linux".into()),
            ("arch_bits", usize::BITS.to_string()),
            ("process_id", std::process::id().to_string()),
            ("uptime_in_seconds", uptime.to_string()),
            ("uptime_in_days", (uptime / 86400).to_string()),
            ("io_threads_active", u8::from(gateway.threads > 1).to_string()),
        ],
        "clients" => vec![
            ("connected_clients", gateway.records().len().to_string()),
            ("maxclients", gateway.clients_max.to_string()),
            ("blocked_clients", "0".into()),
        ],
        "memory" => vec![
            ("used_memory", figures.used_bytes.to_string()),
            ("maxmemory", gateway.limits.region_bytes.to_string()),
            ("maxmemory_policy", eviction_policy(gateway).into()),
        ],
        "stats" => vec![
            ("total_connections_received", counts.connections.load(Relaxed).to_string()),
            ("total_commands_processed", counts.commands.load(Relaxed).to_string()),
            ("rejected_connections", counts.refused.load(Relaxed).to_string()),
            ("expired_keys", figures.keys_expired.to_string()),
            ("evicted_keys", figures.keys_evicted.to_string()),
        ],
        "cpu" => {
            let [user, system] = processor_seconds();
            vec![("used_cpu_sys", format!("{system:.6}")), ("used_cpu_user", format!("{user:.6}"))]
        }
        // As in redis there is no line without keys. How many of them expire is not known.
        "keyspace" if figures.keys == 0 => vec![],
        "keyspace" => vec![("db0", format!("keys={},expires=0,avg_ttl=0", figures.keys))],
        "replication" => vec![("role", "master".into()), ("connected_slaves", "0".into())],
        _ => vec![("cluster_enabled", "0".into())],
    }
}

/// What redis calls the store's way to make room.
pub(crate) fn eviction_policy(gateway: &Gateway) -> &'static str {
    if gateway.figures().is_cache { "allkeys-lru" } else { "noeviction" }
}

/// The time of the gateway's threads on processors, in user mode and in the kernel.
fn processor_seconds() -> [f64; 2] {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program is in parentheses, and may have any bytes.
    let behind_name = text.rsplit(')').next().unwrap_or_default();
    let mut fields = behind_name.split_whitespace().skip(11).map(|field| field.parse());
    let ticks = clock_ticks_per_second() as f64;
    [(); 2].map(|()| fields.next().and_then(|field| field.ok()).unwrap_or(0.0) / ticks)
}

/// The line of CLIENT LIST for a connection.
pub(crate) fn client_line(record: &ClientRecord) -> String {
    let age_ms = record.age_ms();
    let idle_ms = age_ms.saturating_sub(record.active_ms.load(Relaxed));
    let command = COMMANDS.get(usize::from(record.command.load(Relaxed)));
    format!(
        "id={} addr={} laddr={} fd={} name={} age={} idle={} flags=N db=0 sub=0 psub=0 ssub=0 \
         multi=-1 events=r cmd={} user=default redir=-1 resp={}\n",
        record.id,
        record.address,
        record.local_address,
        record.descriptor,
        record.name(),
        age_ms / 1000,
        idle_ms / 1000,
        command.map_or("NULL", |spec| spec.name),
        record.protocol.load(Relaxed),
    )
}
