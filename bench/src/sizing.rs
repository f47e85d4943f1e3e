//! The memory that a server needs for a run.

use farside_config::ServerConfig;
use farside_config::size::ByteSize;
use farside_fabric::resources::{Meminfo, available_memory};
use farside_layout::{
    CHUNK_BYTES, REGION_BYTES_MIN, ROWS_PER_SUBTABLE, SLOTS_PER_ROW, SUBTABLE_BYTES, SizeClass,
    block_bytes, class_for,
};

use crate::records::{KEY_BYTES, ValueSize};
use crate::workload::{Kind, Mix};
use crate::{Error, Result};

/// The properties of a run that decide how much memory it needs.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// The number of loaded records.
    pub records: u64,
    /// The lengths of their values.
    pub sizes: ValueSize,
    /// The number of threads. Each has a session with free blocks of its own.
    pub threads: u64,
    /// The mix of operations.
    pub mix: Mix,
    /// How many operations start in a second, if that is known.
    pub target_rate: Option<f64>,
    /// How many operations are measured, if that is known.
    pub operations: Option<u64>,
    /// How long the measurement takes, in seconds, if that is known.
    pub seconds: Option<f64>,
    /// How long the warm-up takes, in seconds.
    pub warmup_seconds: f64,
    /// The number of servers, each with a part of the keys. The memory is that of each.
    pub servers: u64,
}

/// The memory settings of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerMemory {
    /// The region, in bytes.
    pub region_bytes: u64,
    /// The part of the region that is the index, in bytes.
    pub index_bytes: u64,
    /// The longest value, in bytes.
    pub value_bytes_max: u64,
}

impl ServerMemory {
    /// The same settings for a region of another size. The index becomes at most half of the heap;
    /// the server lets it grow later.
    pub fn in_region(self, region_bytes: u64) -> Self {
        // A size that is too small for a region is refused by the server.
        let bytes = region_bytes.max(REGION_BYTES_MIN);
        let geometry = ServerConfig::default().format(bytes, [0; 16], [0; 16]).geometry();
        let half = u64::from(geometry.chunks()) * CHUNK_BYTES / 2;
        let index_bytes_max = SUBTABLE_BYTES << (half / SUBTABLE_BYTES).max(1).ilog2();
        Self { region_bytes, index_bytes: self.index_bytes.min(index_bytes_max), ..self }
    }
}

/// A server's default limit on values, in bytes.
pub const VALUE_BYTES_MAX_DEFAULT: u64 = 1 << 20;
/// Assumed limit on a thread's operations a second, if its rate is not known.
pub const OPERATIONS_PER_S_MAX: u64 = 10_000_000;
/// Assumed limit on a thread's writes, in bytes a second.
const WRITE_BYTES_PER_S_MAX: u64 = 6 << 30;
/// How long an overwritten block is unusable, in milliseconds: twice the default GRACE, of which
/// the second half is for the way back into use.
const QUARANTINE_MS: u64 = 200;
const HEADROOM_BYTES: u64 = 256 << 20;
/// The least headroom of one of several servers.
const HEADROOM_BYTES_MIN: u64 = 16 << 20;
/// How many records more than its share any server may get.
const RECORDS_SLACK: u64 = 64;
/// One of several servers may get this many times its share of the writes, because of hot keys.
const WRITES_SLACK: u64 = 3;
/// Limit on the free blocks that a session holds, in bytes and in blocks.
const SESSION_BYTES: u64 = 16 << 20;
const SESSION_BLOCKS: u64 = 64;
/// Limit on the load of the index, in percent, so that no run has to wait for a split. In
/// simulations the first full window appears at a load of 30 to 37 % with 2^13 subtables, and at 27
/// to 29 % with 2^17.
const INDEX_LOAD_PERCENT_MAX: u64 = 25;

/// The number of records from which the memory of all is estimated.
const SAMPLE: u64 = 1 << 16;

impl Demand {
    /// The number of inserts of the run, if a thread without a target rate does `thread_per_s`
    /// operations a second.
    fn inserts(&self, thread_per_s: u64) -> u64 {
        let inserts = self.mix.share(Kind::Insert);
        let per_s_max = (OPERATIONS_PER_S_MAX * self.threads) as f64;
        let guess = (thread_per_s * self.threads) as f64;
        let per_s = self.target_rate.map_or(guess, |target| target.min(per_s_max));
        let measured_max = self.operations.map_or(f64::INFINITY, |operations| operations as f64);
        let measured =
            self.seconds.map_or(measured_max, |seconds| measured_max.min(per_s * seconds));
        ((per_s * self.warmup_seconds + measured) * inserts) as u64
    }

    /// The memory for the run, however fast the threads insert.
    pub fn memory(&self) -> Result<ServerMemory> {
        self.memory_at(OPERATIONS_PER_S_MAX)
    }

    /// The memory for the run, at most `available_bytes`. If the rate of inserts is
    /// only guessed, at most half of the available memory, unless the run surely needs more.
    ///
    /// # Errors
    /// [`Error::Usage`] also if the run surely needs more than is available.
    pub fn memory_within(&self, available_bytes: u64) -> Result<ServerMemory> {
        let (memory, least) = (self.memory()?, self.memory_at(0)?.region_bytes);
        if least > available_bytes {
            let [least, available] =
                [least, available_bytes].map(|it| ByteSize(it * self.servers).rounded());
            return Err(Error::Usage(format!(
                "this run needs {least} of memory, and {available} are available: set a smaller \
                 region with --memory, or load less with --records, or insert less with \
                 --operations or --target-rate"
            )));
        }
        let half = available_bytes / 2 / CHUNK_BYTES * CHUNK_BYTES;
        Ok(memory.in_region(memory.region_bytes.min(half).max(least)))
    }

    fn memory_at(&self, thread_per_s: u64) -> Result<ServerMemory> {
        let bytes_max = u64::from(self.sizes.max());
        let longest = class(self.sizes.max())?.block_bytes();
        let records = self.of_each(self.records + self.inserts(thread_per_s));
        let slots = (SLOTS_PER_ROW * ROWS_PER_SUBTABLE) as u64;
        let subtables = (records * 100).div_ceil(slots * INDEX_LOAD_PERCENT_MAX);
        let index_bytes = subtables.next_power_of_two() * SUBTABLE_BYTES;
        let heap_bytes = self.heap_bytes(records)?;
        let mean = block_bytes(KEY_BYTES, self.sizes.mean() as usize);
        let mean = mean.max(class(self.sizes.min())?.block_bytes());
        let rate = (OPERATIONS_PER_S_MAX * mean).min(WRITE_BYTES_PER_S_MAX);
        let writes = self.mix.share(Kind::Put) + self.mix.share(Kind::Rmw);
        let quarantine = if writes > 0.0 { rate / 1000 * QUARANTINE_MS } else { 0 };
        let quarantine = quarantine.min(quarantine / self.servers * WRITES_SLACK);
        let per_session = quarantine + SESSION_BYTES.max(SESSION_BLOCKS * longest);
        let tables = index_bytes / 64 + 4 * CHUNK_BYTES;
        let headroom = (HEADROOM_BYTES / self.servers).max(HEADROOM_BYTES_MIN);
        let region_bytes =
            index_bytes + heap_bytes + headroom + tables + self.threads * per_session;
        Ok(ServerMemory {
            region_bytes: region_bytes.next_multiple_of(CHUNK_BYTES),
            index_bytes,
            value_bytes_max: bytes_max.max(VALUE_BYTES_MAX_DEFAULT),
        })
    }

    /// The part of these records that a server may get: an eighth more than its equal share, and
    /// some for small numbers. Four standard deviations fit into it.
    fn of_each(&self, records: u64) -> u64 {
        if self.servers == 1 {
            return records;
        }
        let equal = records.div_ceil(self.servers);
        records.min(equal + equal / 8 + RECORDS_SLACK)
    }

    /// The memory for the blocks of this number of records, computed from a sample of them.
    fn heap_bytes(&self, records: u64) -> Result<u64> {
        let span_bytes = |class: SizeClass| class.chunks_per_span() * CHUNK_BYTES;
        let sample = records.min(SAMPLE);
        let mut sampled = 0;
        for record in 0..sample {
            let class = class(self.sizes.of(record))?;
            sampled += span_bytes(class).div_ceil(class.blocks_per_span());
        }
        let blocks = (u128::from(records) * u128::from(sampled)).div_ceil(sample.into()) as u64;
        // Adds a tenth for the sample's error, and for each class the unused part of a span.
        let ends = class(self.sizes.min())?.block_bytes()..=class(self.sizes.max())?.block_bytes();
        let classes = SizeClass::all().filter(|class| ends.contains(&class.block_bytes()));
        Ok(blocks + blocks / 10 + classes.map(span_bytes).sum::<u64>())
    }
}

fn class(value_bytes: u32) -> Result<SizeClass> {
    class_for(KEY_BYTES, value_bytes as usize)
        .ok_or_else(|| Error::Usage(format!("no block holds a value of {value_bytes} bytes")))
}

/// Returns how much memory the system can give at once, in bytes: in normal pages, within the
/// limits of cgroups, or in reserved huge pages if these are more.
pub fn available_bytes() -> Result<u64> {
    let meminfo = Meminfo::read().map_err(Error::system("reading how much memory there is"))?;
    let huge = |meminfo: &Meminfo| {
        Some(meminfo.number("HugePages_Free")? * meminfo.bytes("Hugepagesize")?)
    };
    // The pool does not count against the limit of a cgroup.
    let ordinary = available_memory().map_or(0, |(bytes, _)| bytes);
    Ok(ordinary.max(huge(&meminfo).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Workload;

    fn demand() -> Demand {
        Demand {
            records: 1_000_000,
            sizes: ValueSize::Constant(64),
            threads: 1,
            mix: Workload::C.mix(),
            target_rate: None,
            operations: None,
            seconds: Some(10.0),
            warmup_seconds: 0.0,
            servers: 1,
        }
    }

    #[test]
    fn a_million_small_records_fit_in_an_index_that_does_not_overflow() {
        let memory = demand().memory().unwrap();
        let slots = memory.index_bytes / SUBTABLE_BYTES * 448;
        let load = 1_000_000.0 / slots as f64;
        assert!((0.1..0.26).contains(&load), "{load}");
        let blocks = 1_000_000 * 128;
        assert!(memory.region_bytes > blocks + memory.index_bytes + HEADROOM_BYTES);
        assert!(memory.region_bytes < 700 << 20, "{memory:?}");
    }

    #[test]
    fn writes_and_inserts_need_more_memory_than_reads() {
        let reads = demand().memory().unwrap();
        let writes = Demand { mix: Workload::A.mix(), ..demand() }.memory().unwrap();
        let inserts = Demand { mix: Workload::D.mix(), ..demand() };
        let few = Demand { operations: Some(1000), ..inserts }.memory().unwrap();
        let slow = Demand { target_rate: Some(100.0), ..inserts }.memory().unwrap();
        assert_eq!(few.region_bytes, slow.region_bytes);
        let inserts = inserts.memory().unwrap();
        assert!(writes.region_bytes > reads.region_bytes);
        assert!(inserts.region_bytes > reads.region_bytes);
        assert!(inserts.index_bytes > reads.index_bytes);
        assert!(few.region_bytes < inserts.region_bytes);
        assert!(Demand { sizes: ValueSize::Constant(5 << 20), ..demand() }.memory().is_err());
    }

    #[test]
    fn the_index_never_takes_over_half_of_the_heap() {
        let inserts = Demand { mix: Workload::D.mix(), seconds: Some(600.0), ..demand() };
        let memory = inserts.memory().unwrap();
        assert!(memory.region_bytes > 64 << 30, "{memory:?}");
        for region_bytes in [0, 8 << 20, 64 << 20, 1 << 30, 100 << 30] {
            let small = memory.in_region(region_bytes);
            let subtables = small.index_bytes / SUBTABLE_BYTES;
            assert!(subtables.is_power_of_two(), "{small:?}");
            // The tables before the heap take less than a tenth.
            let is_half = small.index_bytes <= region_bytes.max(8 << 20) / 2;
            let is_fair = small.index_bytes >= region_bytes / 5;
            assert!(is_half && (is_fair || small.index_bytes == memory.index_bytes), "{small:?}");
        }
    }

    #[test]
    fn a_guessed_demand_gets_half_of_the_memory_and_a_known_demand_has_to_fit() {
        let inserts = Demand { mix: Workload::D.mix(), seconds: Some(600.0), ..demand() };
        let guessed = inserts.memory_within(8 << 30).unwrap();
        assert_eq!(guessed.region_bytes, 4 << 30);
        assert!(guessed.index_bytes <= 2 << 30);
        // Reads need the same amount, however much is available.
        let reads = demand().memory().unwrap();
        assert_eq!(demand().memory_within(reads.region_bytes).unwrap(), reads);
        let known = Demand { operations: Some(10_000_000_000), seconds: None, ..inserts };
        for known in [known, Demand { records: 1 << 30, ..inserts }] {
            let error = known.memory_within(8 << 30).unwrap_err().to_string();
            for flag in ["--memory", "--operations", "--target-rate"] {
                assert!(error.contains(flag), "{error}");
            }
        }
    }

    #[test]
    fn several_servers_divide_the_memory_and_each_has_room_for_more_than_its_share() {
        let of = |servers| Demand { servers, ..demand() };
        let memory = |servers| of(servers).memory().unwrap().region_bytes;
        assert!(memory(4) < memory(1) && memory(64) < memory(4));
        assert!(of(4).of_each(1_000_000) > 250_000 && of(64).of_each(50) == 50);
        assert_eq!(of(2).of_each(60), 60);
        let writes = |servers| Demand { mix: Workload::A.mix(), ..of(servers) }.memory().unwrap();
        assert!(writes(8).region_bytes < writes(1).region_bytes);
        assert!(writes(8).region_bytes > memory(8));
    }

    #[test]
    fn values_of_different_lengths_need_the_blocks_of_their_classes() {
        for sizes in [ValueSize::Uniform(16, 4096), ValueSize::Facebook, ValueSize::ZippyDb] {
            let demand = Demand { sizes, ..demand() };
            let blocks = |record| class(sizes.of(record)).unwrap().block_bytes();
            let exact: u64 = (0..demand.records).map(blocks).sum();
            let heap = demand.heap_bytes(demand.records).unwrap();
            // Each of about a hundred classes has a span of a few chunks.
            assert!(heap > exact && heap < exact + exact / 4 + (1 << 30), "{sizes}: {heap}");
            let memory = demand.memory().unwrap();
            assert!(memory.value_bytes_max >= sizes.max().into());
        }
    }
}
