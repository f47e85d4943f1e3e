//! `stat` and `verify`: what regions hold, and whether it is valid.

use std::io::Write;
use std::path::Path;

use farside_cli::check::{ClassUse, Problem, Report, Scope};
use farside_cli::formats::{printable, to_json};
use farside_config::command_line::exit_code;
use farside_control::ServerStatistics;
use farside_layout::{CHUNK_BYTES, SlotState};
use serde::Serialize;

use crate::args::Args;
use crate::connect;
use crate::output::{self, ExitStatus, bytes, count};
use crate::raw::{self, BarObserver, RawRegion};

/// `stat`: combines the server's statistics with a walk through the index.
pub(crate) fn stat(args: &Args, json: bool) -> anyhow::Result<ExitStatus> {
    let config = connect::config(args)?;
    // Asks before the walk connects, so that the server counts one client of this command instead
    // of two.
    let client = connect::reader(args)?;
    let shards = client.admin().shards();
    let statistics: Vec<_> =
        (0..shards).map(|shard| client.admin().shard(shard).statistics()).collect();
    drop(client);
    let (bar, mut status) = (output::progress("reading the index"), ExitStatus::Done);
    let regions = RawRegion::open_all(&config)?;
    for (shard, (region, statistics)) in regions.into_iter().zip(statistics).enumerate() {
        let both = region.and_then(|region| Ok((region, statistics?)));
        let available = output::available(both, (shard, shards.into()), &mut status)?;
        let Some((mut region, statistics)) = available else { continue };
        let report = region.check(Scope::Index, &bar)?;
        bar.finish_and_clear();
        let server = region.server();
        let shard = (shards > 1).then_some(shard);
        let overview = Overview { shard, ..Overview::new(server, &statistics, &report) };
        let mut stdout = output::stdout();
        if json {
            writeln!(stdout, "{}", to_json(&overview)?)?;
        } else {
            stdout.write_all(overview.table().as_bytes())?;
        }
        output::finish(stdout)?;
        if !report.is_clean() {
            output::print_message("the index is damaged: run `kv-cli verify`");
            status = status.or_failed(exit_code::DAMAGE);
        }
    }
    Ok(status)
}

/// The output of `stat`. The field names are those of the JSON.
#[derive(Debug, Serialize)]
struct Overview {
    /// In a cluster: the number of the shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<usize>,
    server: String,
    uptime_ms: u64,
    incarnation: u64,
    /// The number of connected clients, without this command.
    clients: u64,
    clients_lost: u64,
    keys: u64,
    slots: u64,
    load_factor: f64,
    subtables: u64,
    index: Index,
    memory: Memory,
    blocks_taken: u64,
    blocks_returned: u64,
    requests_denied: u64,
    recalls: u64,
    collector: Collector,
    keys_expired: u64,
    keys_evicted: u64,
    reads_found: u64,
    reads_absent: u64,
    snapshots: Snapshots,
    key_bytes_max: u32,
    value_bytes_max: u32,
    grace_ms: u32,
    problems: u64,
    classes: Vec<Class>,
}

/// Statistics of the index's growth.
#[derive(Debug, Serialize)]
struct Index {
    directory_depth: u64,
    /// Places for subtables that are not in use.
    subtables_free: u64,
    /// The number of splits since the server started.
    splits: u64,
    /// Subtables that were being split when the walk read them.
    splitting: u64,
    /// Splits that cannot end because an entry is damaged.
    stuck: u64,
}

/// How the region's bytes are used.
#[derive(Debug, Serialize)]
struct Memory {
    region_bytes: u64,
    /// The part of `region_bytes` in 2 MiB pages.
    huge_page_bytes: u64,
    /// Free chunks.
    free_bytes: u64,
    index_bytes: u64,
    /// Chunks carved into blocks.
    blocks_bytes: u64,
    /// The part of `blocks_bytes` in chunks whose blocks hold no key and are with no client. They
    /// become free once no client can access one of their old blocks.
    emptying_bytes: u64,
    /// Blocks that hold a key.
    linked_bytes: u64,
    /// What a key takes on average: the chunks of index and blocks, divided by the keys. 0 without
    /// keys.
    bytes_per_key: u64,
}

/// The collector of blocks that dead clients held.
#[derive(Debug, Serialize)]
struct Collector {
    state: &'static str,
    collections: u64,
    blocks_collected: u64,
}

/// The snapshots of all clients.
#[derive(Debug, Serialize)]
struct Snapshots {
    under_way: u64,
    /// Progress of the snapshot that is least advanced, in thousandths.
    permille: u64,
    /// Completed since the server started.
    taken: u64,
}

#[derive(Debug, Serialize)]
struct Class {
    block_bytes: u64,
    /// What the blocks hold. Two classes of the same length hold different contents.
    content: &'static str,
    chunks: u64,
    blocks: u64,
    /// Blocks that hold a key.
    linked: u64,
    /// Free blocks in the server's depot.
    free: u64,
    /// The part of `free` that still rests for GRACE.
    resting: u64,
    /// All other blocks: resting or ready at clients, for their next writes.
    with_clients: u64,
    /// Keys that the server removed to make room for others.
    evicted: u64,
    /// How long after their write keys are evicted: the mean of the latest evictions.
    evicted_after_ms: u64,
}

impl Overview {
    fn new(server: String, statistics: &ServerStatistics, report: &Report) -> Self {
        let memory = Memory {
            region_bytes: report.format.region_bytes,
            huge_page_bytes: statistics.huge_page_bytes,
            free_bytes: report.chunks.free * CHUNK_BYTES,
            index_bytes: report.chunks.subtables * CHUNK_BYTES,
            blocks_bytes: report.chunks.blocks * CHUNK_BYTES,
            emptying_bytes: statistics.chunks_emptying * CHUNK_BYTES,
            linked_bytes: report.block_bytes,
            bytes_per_key: (report.chunks.subtables + report.chunks.blocks) * CHUNK_BYTES
                / report.keys.max(1)
                * u64::from(report.keys > 0),
        };
        Self {
            shard: None,
            server,
            uptime_ms: statistics.uptime_ms,
            incarnation: statistics.incarnation,
            clients: statistics.clients.saturating_sub(1),
            clients_lost: statistics.clients_lost,
            keys: report.keys,
            slots: report.slots_total(),
            load_factor: report.load_factor(),
            subtables: report.subtables,
            index: Index {
                directory_depth: statistics.directory_depth,
                subtables_free: statistics.subtables_free,
                splits: statistics.splits,
                splitting: report.subtables_splitting,
                stuck: statistics.splits_stuck,
            },
            memory,
            blocks_taken: statistics.blocks_taken,
            blocks_returned: statistics.blocks_returned,
            requests_denied: statistics.requests_denied,
            recalls: statistics.recalls,
            collector: Collector {
                state: match statistics.collecting {
                    0 => "idle",
                    1 => "walking the index",
                    _ => "waiting for clients",
                },
                collections: statistics.collections,
                blocks_collected: statistics.blocks_collected,
            },
            keys_expired: statistics.keys_expired,
            keys_evicted: statistics.keys_evicted,
            reads_found: statistics.reads_found,
            reads_absent: statistics.reads_absent,
            snapshots: Snapshots {
                under_way: statistics.snapshots,
                permille: statistics.snapshot_permille,
                taken: statistics.snapshots_taken,
            },
            key_bytes_max: report.format.key_bytes_max,
            value_bytes_max: report.format.value_bytes_max,
            grace_ms: report.format.grace_ms,
            problems: report.problem_count,
            classes: classes(statistics, report),
        }
    }

    fn server_and_shard(&self) -> String {
        let server = printable(&self.server).to_string();
        self.shard.map_or(server.clone(), |shard| format!("{server}, shard {shard}"))
    }

    /// The share of reads that found their key.
    fn reads(&self) -> String {
        let reads = self.reads_found.saturating_add(self.reads_absent);
        if reads == 0 {
            return "none reported by clients".into();
        }
        let percent = self.reads_found as f64 * 100.0 / reads as f64;
        format!("{percent:.2} % of {reads} found their key, as clients report")
    }

    fn table(&self) -> String {
        let (memory, index) = (&self.memory, &self.index);
        let seconds = self.uptime_ms / 1000;
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let mut table = [
            ("server", self.server_and_shard()),
            ("up", format!("{hours}:{minutes:02}:{seconds:02}, start {}", self.incarnation)),
            ("clients", format!("{} ({} lost so far)", self.clients, self.clients_lost)),
            ("keys", self.keys.to_string()),
            ("load", format!("{:.3} of {} slots", self.load_factor, self.slots)),
            (
                "subtables",
                format!(
                    "{}, {} free; {} split, {} being split, {} stuck; directory of {} bits",
                    self.subtables,
                    index.subtables_free,
                    index.splits,
                    index.splitting,
                    index.stuck,
                    index.directory_depth
                ),
            ),
            ("memory", bytes(memory.region_bytes)),
            ("  huge", format!("{} in 2 MiB pages", bytes(memory.huge_page_bytes))),
            ("  free", bytes(memory.free_bytes)),
            ("  index", bytes(memory.index_bytes)),
            (
                "  blocks",
                format!("{}, {} with keys", bytes(memory.blocks_bytes), bytes(memory.linked_bytes)),
            ),
            ("  emptying", bytes(memory.emptying_bytes)),
            ("  a key", format!("{}, with its share of the index", bytes(memory.bytes_per_key))),
            (
                "limits",
                format!(
                    "keys {}, values {}",
                    bytes(self.key_bytes_max.into()),
                    bytes(self.value_bytes_max.into())
                ),
            ),
            ("grace", format!("{} ms", self.grace_ms)),
            ("refused", format!("{} requests for blocks", self.requests_denied)),
            ("recalled", format!("spare blocks, {} times", self.recalls)),
            (
                "collector",
                format!(
                    "{}, {} so far, {} found",
                    self.collector.state,
                    output::count(self.collector.collections, "collection"),
                    output::count(self.collector.blocks_collected, "lost block"),
                ),
            ),
            ("removed", format!("{} expired, {} evicted", self.keys_expired, self.keys_evicted)),
            ("reads", self.reads()),
            (
                "snapshots",
                match &self.snapshots {
                    Snapshots { under_way: 0, taken, .. } => format!("{taken} so far"),
                    Snapshots { under_way, permille, taken } => {
                        let percent = *permille as f64 / 10.0;
                        format!("{under_way} under way, at {percent:.1} %; {taken} so far")
                    }
                },
            ),
        ]
        .map(|(name, value)| format!("{name:<12}{value}\n"))
        .concat();
        if !self.classes.is_empty() {
            let of_blocks = ["chunks", "blocks", "with keys", "free", "resting"];
            let others = ["with clients", "evicted", "after"];
            table += &row("block", of_blocks.into_iter().chain(others).map(str::to_owned));
        }
        for class in &self.classes {
            let Class { chunks, blocks, linked, free, resting, with_clients, evicted, .. } = *class;
            let numbers = [chunks, blocks, linked, free, resting, with_clients, evicted];
            let after = match evicted {
                0 => "-".to_owned(),
                _ => format!("{:.1} s", class.evicted_after_ms as f64 / 1000.0),
            };
            let numbers = numbers.into_iter().map(|number| number.to_string());
            let block = output::block_name(class.content, class.block_bytes);
            table += &row(&block, numbers.chain([after]));
        }
        table
    }
}

fn row(block: &str, cells: impl Iterator<Item = String>) -> String {
    // The longest blocks are "extent 1.0 MiB" and "head 128.0 KiB". The longest title has 12
    // letters.
    let padded = cells.map(|cell| format!("{cell:>13}"));
    format!("{block:>14}{}", padded.collect::<String>()).trim_end().to_owned() + "\n"
}

/// The classes in use. The server and the walk count at different moments, so `with_clients` is an
/// estimate while clients work.
fn classes(statistics: &ServerStatistics, report: &Report) -> Vec<Class> {
    let class = |class_use: &ClassUse| {
        let mut in_depot = statistics.classes.iter();
        let in_depot = in_depot.find(|in_depot| in_depot.class == class_use.class);
        let free = in_depot.map_or(0, |in_depot| in_depot.blocks_free);
        let resting = in_depot.map_or(0, |in_depot| in_depot.blocks_resting);
        let evicted = in_depot.map_or(0, |in_depot| in_depot.evicted);
        let evicted_after_ms = in_depot.map_or(0, |in_depot| in_depot.evicted_after_ms);
        let (blocks, linked) = (class_use.blocks(), class_use.blocks_linked);
        Class {
            block_bytes: class_use.class.block_bytes(),
            content: class_use.class.content(),
            chunks: class_use.chunks,
            blocks,
            linked,
            free,
            resting,
            with_clients: blocks.saturating_sub(linked + free),
            evicted,
            evicted_after_ms,
        }
    };
    report.classes.iter().map(class).collect()
}

/// `verify`: prints the report on stdout; the exit code tells whether there is damage.
pub(crate) fn verify(args: &Args, region_file: Option<&Path>) -> anyhow::Result<ExitStatus> {
    let bar = output::progress("verifying");
    if let Some(path) = region_file {
        let report = raw::check_file(path, &mut BarObserver(&bar))?;
        bar.finish_and_clear();
        return conclude(&report, true);
    }
    let regions = RawRegion::open_all(&connect::config(args)?)?;
    let (shards, mut status) = (regions.len(), ExitStatus::Done);
    for (shard, region) in regions.into_iter().enumerate() {
        if shards > 1 {
            print(&format!("shard       {shard}\n"))?;
        }
        let available = output::available(region, (shard, shards), &mut status)?;
        let Some(mut region) = available else { continue };
        let report = region.check(Scope::Blocks, &bar)?;
        bar.finish_and_clear();
        if let ExitStatus::Failed(code) = conclude(&report, false)? {
            status = status.or_failed(code);
        }
    }
    Ok(status)
}

fn print(text: &str) -> anyhow::Result<ExitStatus> {
    let mut stdout = output::stdout();
    stdout.write_all(text.as_bytes())?;
    output::finish(stdout)
}

/// Prints the report of one region.
fn conclude(report: &Report, is_offline: bool) -> anyhow::Result<ExitStatus> {
    print(&describe(report))?;
    if !report.is_clean() {
        output::print_message(advice(report, is_offline));
    }
    Ok(if report.is_clean() { ExitStatus::Done } else { ExitStatus::Failed(exit_code::DAMAGE) })
}

/// Returns advice on repairing the damage.
fn advice(report: &Report, is_offline: bool) -> &'static str {
    let in_blocks_only = report.problems.len() as u64 == report.problem_count
        && report.problems.iter().all(|problem| matches!(problem, Problem::Block { .. }));
    match (in_blocks_only, is_offline) {
        (true, false) => {
            "values are damaged: store or delete their keys; all other values are intact"
        }
        (true, true) => {
            "values are damaged: start a server on this region, then store or delete their keys"
        }
        (false, false) => {
            "the index is damaged: save what can be read with `kv-cli snapshot FILE`, then start a \
             server with `--restore FILE` and another region file"
        }
        (false, true) => {
            "the index is damaged, and a server may refuse this region: start one with another \
             region file and your last snapshot (`--restore`), and keep this one for a report"
        }
    }
}

fn describe(report: &Report) -> String {
    let region = bytes(report.format.region_bytes);
    let mut lines = vec![
        format!("region      {region}, incarnation {}", report.incarnation),
        format!(
            "index       {}, {}, load {:.3}",
            count(report.subtables, "subtable"),
            count(report.slots_total(), "slot"),
            report.load_factor()
        ),
        format!(
            "keys        {}, {} of keys, {} of values, in {} of blocks",
            report.keys,
            bytes(report.key_bytes),
            bytes(report.value_bytes),
            bytes(report.block_bytes)
        ),
    ];
    lines.extend(unusual_states(report).map(|line| format!("            {line}")));
    lines.extend(report.problems.iter().map(|problem| format!("DAMAGE      {problem}")));
    let unprinted = report.problem_count - report.problems.len() as u64;
    if unprinted > 0 {
        lines.push(format!("DAMAGE      ... and {unprinted} more"));
    }
    lines.push(match report.problem_count {
        0 => "verdict     no damage".into(),
        problems => format!("verdict     {} found", count(problems, "problem")),
    });
    lines.join("\n") + "\n"
}

/// Counts the slots and subtables in states that most regions do not have, and that are no damage.
fn unusual_states(report: &Report) -> impl Iterator<Item = String> {
    let slots = |state| report.slots(state);
    let counts = [
        (slots(SlotState::Pending), "slot", "that an insert owns (PENDING)"),
        (slots(SlotState::Aborted), "slot", "that an insert lost (ABORTED)"),
        (slots(SlotState::Tomb), "slot", "removed and waiting for GRACE (TOMB)"),
        (slots(SlotState::Frozen), "slot", "that a split is moving (FROZEN)"),
        (slots(SlotState::Copy), "slot", "that a split is filling (COPY)"),
        (slots(SlotState::Moved), "slot", "that a split has moved (MOVED)"),
        (report.subtables_splitting, "subtable", "being split"),
        (
            report.stale_marks,
            "key",
            "marked but still linked: one more round trip until the next put",
        ),
        (report.unsettled, "slot", "that changed at every read"),
    ];
    counts
        .into_iter()
        .filter(|(number, ..)| *number > 0)
        .map(|(number, noun, state)| format!("{} {state}", count(number, noun)))
}
