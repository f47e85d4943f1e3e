//! The metrics of a server: their names, types, units and texts, and the numbers behind them.
//!
//! docs/operations.md has the same names, which a test checks. A label has one of a fixed set of
//! values, or a class of blocks. No key is ever a label.

use std::fmt;
use std::time::Duration;

use farside_layout::{CHUNK_BYTES, SLOTS_PER_SUBTABLE};
use farside_metrics::{Collector, DescriptorEncoder, Families, MetricType, Unit, encode_count};

use super::ProcessFigures;
use super::snapshot::ServiceSnapshot;

/// All numbers of one answer.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    pub(super) service: ServiceSnapshot,
    pub(super) process: ProcessFigures,
    /// `None` if the system does not say it.
    pub(super) started_at: Option<Duration>,
    pub(super) region_bytes: u64,
    /// How long it took to open the region.
    pub(super) recovery: Duration,
    /// An estimate of the number of keys. `None` if the region cannot be read.
    pub(super) keys: Option<u64>,
}

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families::new(encoder);
        self.server(&mut families)?;
        self.memory(&mut families)?;
        self.index(&mut families)?;
        self.clients(&mut families)?;
        self.removals(&mut families)?;
        self.control(&mut families)?;
        self.process(&mut families)
    }
}

impl Figures {
    fn server(&self, to: &mut Families<'_>) -> fmt::Result {
        let statistics = &self.service.statistics;
        to.info(
            "farside_build",
            "The version of kv-server.",
            ("version", env!("CARGO_PKG_VERSION")),
        )?;
        to.gauge(
            "farside_incarnation",
            "How many times a server has started on the region.",
            statistics.incarnation,
        )?;
        to.seconds(
            "farside_recovery",
            "How long this start took to make or check the region, and to wait for former clients.",
            self.recovery,
        )?;
        let name = "farside_view_number";
        let help = "The number of the cluster's view that the server owns. 0 without a view.";
        match self.service.view {
            None => to.gauge(name, help, 0),
            Some(view) => {
                let shard = view.shard.to_string();
                to.gauges(name, help, None, [([("shard", &*shard)], view.number)])
            }
        }
    }

    fn memory(&self, to: &mut Families<'_>) -> fmt::Result {
        let statistics = &self.service.statistics;
        let bytes = |chunks: u64| chunks * CHUNK_BYTES;
        let blocks = statistics
            .chunks
            .saturating_sub(statistics.chunks_free + statistics.chunks_index)
            .saturating_sub(statistics.chunks_emptying);
        to.bytes("farside_region", "The size of the region.", self.region_bytes)?;
        to.bytes(
            "farside_huge_page",
            "The part of the region in 2 MiB pages.",
            statistics.huge_page_bytes,
        )?;
        to.gauges(
            "farside_heap",
            "Chunks of the heap, by their use.",
            Some(&Unit::Bytes),
            [
                ([("state", "free")], bytes(statistics.chunks_free)),
                ([("state", "index")], bytes(statistics.chunks_index)),
                ([("state", "blocks")], bytes(blocks)),
                ([("state", "emptying")], bytes(statistics.chunks_emptying)),
            ],
        )?;
        self.classes(to)?;
        to.counter("farside_blocks_taken", "Blocks that clients took.", statistics.blocks_taken)?;
        to.counter(
            "farside_blocks_returned",
            "Blocks that clients gave back, and blocks of removed keys.",
            statistics.blocks_returned,
        )?;
        to.counter(
            "farside_block_requests_denied",
            "Requests for blocks for which there was no memory, and none expected soon.",
            statistics.requests_denied,
        )?;
        to.counter(
            "farside_recalls",
            "How often the server asked all clients for the blocks that they do not need.",
            statistics.recalls,
        )?;
        to.counter(
            "farside_chunks_emptied",
            "Chunks that lost their class and became free.",
            statistics.chunks_emptied,
        )?;
        to.counter(
            "farside_collections",
            "Collections of the blocks of dead clients.",
            statistics.collections,
        )?;
        to.counter(
            "farside_collected_blocks",
            "Blocks of dead clients that are free again.",
            statistics.blocks_collected,
        )
    }

    fn classes(&self, to: &mut Families<'_>) -> fmt::Result {
        let classes = &self.service.statistics.classes;
        let mut metric = to.family(
            "farside_class",
            "Blocks of each class: used ones hold keys or are with clients, free ones are in the \
             depot, and resting ones become free after GRACE.",
            Some(&Unit::Bytes),
            MetricType::Gauge,
        )?;
        for class in classes {
            let free = class.blocks_free.saturating_sub(class.blocks_resting);
            let states = [
                ("used", class.blocks.saturating_sub(class.blocks_free)),
                ("free", free),
                ("resting", class.blocks_resting),
            ];
            let (bytes, content) = (class.class.block_bytes(), class.class.content());
            let block_bytes = bytes.to_string();
            for (state, blocks) in states {
                let labels =
                    [("block_bytes", &*block_bytes), ("content", content), ("state", state)];
                metric.encode_family(&labels)?.encode_gauge(&(blocks * bytes))?;
            }
        }
        let mut metric = to.family(
            "farside_eviction_age",
            "How long after their write keys of each class are evicted: the mean of the latest.",
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?;
        for class in classes.iter().filter(|class| class.evicted > 0) {
            let block_bytes = class.class.block_bytes().to_string();
            let labels = [("block_bytes", &*block_bytes), ("content", class.class.content())];
            let age = class.evicted_after_ms as f64 / 1000.0;
            metric.encode_family(&labels)?.encode_gauge(&age)?;
        }
        Ok(())
    }

    fn index(&self, to: &mut Families<'_>) -> fmt::Result {
        let statistics = &self.service.statistics;
        let slots = statistics.subtables * SLOTS_PER_SUBTABLE as u64;
        if let Some(keys) = self.keys {
            to.gauge("farside_keys", "Keys, estimated from a sample of the index.", keys)?;
            let load = keys as f64 / slots.max(1) as f64;
            let help = "The share of the index's slots that lead to keys, from the same sample.";
            to.real("farside_index_load", help, &Unit::Other("ratio".to_owned()), load)?;
        }
        to.gauge("farside_index_slots", "Slots of the index.", slots)?;
        to.gauge("farside_index_subtables", "Subtables of the index.", statistics.subtables)?;
        to.gauge(
            "farside_index_free_subtables",
            "Places for subtables that are not in use.",
            statistics.subtables_free,
        )?;
        to.gauge(
            "farside_index_directory_depth",
            "How many bits of a hash select an entry of the directory.",
            statistics.directory_depth,
        )?;
        to.counter("farside_index_splits", "Subtables that were split.", statistics.splits)?;
        to.gauge(
            "farside_index_stuck_splits",
            "Splits that cannot end because an entry is damaged.",
            statistics.splits_stuck,
        )?;
        to.counter(
            "farside_index_skipped_slots",
            "How often the server skipped a slot because its word is damaged.",
            statistics.slots_skipped,
        )?;
        to.gauge(
            "farside_index_growth_blocked",
            "1 if the last split found no memory, so that some new keys find no room.",
            self.service.is_growth_blocked.into(),
        )
    }

    fn clients(&self, to: &mut Families<'_>) -> fmt::Result {
        let service = &self.service;
        to.gauges(
            "farside_clients",
            "Connected clients, by their role.",
            None,
            [([("role", "reader")], service.readers), ([("role", "writer")], service.writers)],
        )?;
        to.gauge("farside_clients_max", "Limit on clients.", service.clients_max.into())?;
        to.gauge(
            "farside_sessions",
            "Sessions over TCP and RDMA. Those on shared memory have no connection to count.",
            service.sessions,
        )?;
        to.counts(
            "farside_fences",
            "Clients that were lost and fenced, by the reason.",
            "reason",
            service.fences.iter(),
        )?;
        to.counts(
            "farside_refusals",
            "Connections that were refused, by the reason.",
            "reason",
            service.refusals.iter(),
        )?;
        let help = "Connections that the server probed, over RDMA only.";
        to.counter("farside_probes", help, service.probes)?;
        to.counter(
            "farside_probe_failures",
            "Connections whose host did not answer: a probe over RDMA, or the system over TCP.",
            service.probe_failures,
        )
    }

    fn removals(&self, to: &mut Families<'_>) -> fmt::Result {
        let statistics = &self.service.statistics;
        to.gauge(
            "farside_eviction_enabled",
            "1 if the region is a cache, which evicts keys when it is full.",
            self.service.evicts.into(),
        )?;
        to.counter(
            "farside_evicted_keys",
            "Keys that were removed to make room.",
            statistics.keys_evicted,
        )?;
        to.counter(
            "farside_expired_keys",
            "Keys that were removed because their values had expired.",
            statistics.keys_expired,
        )?;
        to.counts(
            "farside_reported_reads",
            "Reads of keys by their result, as clients report them while the server evicts.",
            "result",
            [("found", statistics.reads_found), ("absent", statistics.reads_absent)],
        )
    }

    fn control(&self, to: &mut Families<'_>) -> fmt::Result {
        let statistics = &self.service.statistics;
        to.counts(
            "farside_control_messages",
            "Messages of clients on the control channel, by their kind.",
            "kind",
            self.service.messages.iter(),
        )?;
        to.counter(
            "farside_reported_operations",
            "Operations on keys that clients report in a cluster. 0 without a cluster.",
            statistics.operations,
        )?;
        to.gauge("farside_snapshots_running", "Snapshots under way.", statistics.snapshots)?;
        let help = "The progress of the snapshot that is least advanced. 0 if there is none.";
        let progress = statistics.snapshot_permille as f64 / 1000.0;
        let ratio = Unit::Other("ratio".to_owned());
        to.real("farside_snapshot_progress", help, &ratio, progress)?;
        to.counter("farside_snapshots", "Completed snapshots.", statistics.snapshots_taken)
    }

    /// The names are those that other programs' processes have, so that dashboards know them.
    fn process(&self, to: &mut Families<'_>) -> fmt::Result {
        let process = &self.process;
        let help = "The time of the process on processors, in user mode and in the kernel.";
        let seconds = Some(&Unit::Seconds);
        let mut metric = to.family("process_cpu", help, seconds, MetricType::Counter)?;
        encode_count(&mut metric, process.cpu.as_secs_f64())?;
        if let Some(memory) = &process.memory {
            let help = "Memory of the process that is present, the region included.";
            to.bytes("process_resident_memory", help, memory.resident_bytes)?;
            let help = "Memory that the process has reserved or mapped.";
            to.bytes("process_virtual_memory", help, memory.virtual_bytes)?;
        }
        if let Some(open) = process.open_fds {
            to.gauge("process_open_fds", "Open descriptors.", open)?;
        }
        if let Some(max) = process.max_fds {
            to.gauge("process_max_fds", "Limit on descriptors.", max)?;
        }
        match self.started_at {
            None => Ok(()),
            Some(started_at) => {
                let help = "When the process started, since the epoch of Unix.";
                to.seconds("process_start_time", help, started_at)
            }
        }
    }
}
