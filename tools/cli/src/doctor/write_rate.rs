//! `doctor --measure`: how fast a device WRITEs into a region that is registered whole, and into
//! one that is registered in slices.
//!
//! The region is memory of this process with 4 KiB pages, with which the two differ most. A queue
//! pair of the device to itself executes the WRITEs, as those of a client would be. Both
//! registrations are measured in turns, and the best turn of each counts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use farside_config::size::ByteSize;
use farside_fabric::memory::{HugePages, Region, RegionMemory};
use farside_fabric::rdma::{Options, Report, SLICE_UNIT_BYTES, slice_bytes_min, slice_count};
use farside_fabric::verbs::{Loopback, Protection};
use farside_fabric::{Buffer, ChainError, Fabric, LaneId, RegionIndex, Role, Verb};

use super::{Check, WRITE_RATE};
use crate::output::bytes;

/// The slices that are advised, and measured in a region that is longer.
const SLICE_BYTES: u64 = 4 << 30;
const WRITE_BYTES: u32 = 64 << 10;
/// The WRITEs in flight.
const LANES: u16 = 16;
/// The distance from one WRITE to the next, in WRITEs: each needs other translations of addresses
/// than the one before it. It is coprime to the number of WRITEs in a region of whole chunks,
/// unless that is a multiple of this prime.
const STRIDE: u64 = 7919;
const TURNS: usize = 3;
const TURN: Duration = Duration::from_secs(1);
/// The memory that is left to other programs, in bytes.
const MEMORY_BYTES_LEFT: u64 = 512 << 20;
/// Slices have to be faster by this factor to be advised.
const GAIN_MIN: f64 = 1.15;

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rates {
    whole: f64,
    slices: f64,
}

/// Measures the first device with an address, if there is enough memory.
pub(super) fn measure(report: &Report, region_bytes: u64, available_bytes: Option<u64>) -> Check {
    let Some((device, address)) = report.addresses().next() else {
        let found = "not measured: no RDMA device with an IPv4 address";
        return Check::warn(WRITE_RATE, found, "the lines about RDMA say what is missing");
    };
    if let Some(check) = too_little_memory(region_bytes, available_bytes) {
        return check;
    }
    match rates(SocketAddr::new(address, 0), region_bytes) {
        Ok(rates) => conclusion(device, region_bytes, rates),
        Err(error) => {
            let advice = "mend this, then measure again";
            Check::warn(WRITE_RATE, format!("{device}: not measured: {error:#}"), advice)
        }
    }
}

/// The slices for a region of this length.
fn slice_bytes(region_bytes: u64) -> u64 {
    let quarter = (region_bytes / 4).next_multiple_of(SLICE_UNIT_BYTES);
    let slice = if region_bytes > SLICE_BYTES { SLICE_BYTES } else { quarter };
    slice.max(slice_bytes_min(region_bytes))
}

fn too_little_memory(region_bytes: u64, available_bytes: Option<u64>) -> Option<Check> {
    let (available, needed) = (available_bytes?, region_bytes + MEMORY_BYTES_LEFT);
    (available < needed).then(|| {
        let (needed, available) = (bytes(needed), bytes(available));
        let found = format!("not measured: it takes {needed}, and {available} are available");
        let remedy = "--measure SIZE takes a shorter region, but devices differ above 4 GiB only";
        Check::warn(WRITE_RATE, found, remedy)
    })
}

fn conclusion(device: &str, region_bytes: u64, Rates { whole, slices }: Rates) -> Check {
    let slice = slice_bytes(region_bytes);
    let found = format!(
        "{device}: {}/s into one memory region of {}, {}/s into {} slices of {}, with 4 KiB pages",
        bytes(whole as u64),
        ByteSize(region_bytes),
        bytes(slices as u64),
        slice_count(region_bytes, slice),
        ByteSize(slice),
    );
    let advice = match slices / whole {
        gain if gain >= GAIN_MIN => {
            let slice = ByteSize(slice);
            let remedy = format!(
                "use huge pages, or mr_slice = \"{slice}\" in the table [rdma] of the server's file"
            );
            return Check::warn(WRITE_RATE, found, remedy);
        }
        _ if region_bytes <= SLICE_BYTES => {
            "no gain; devices differ above 4 GiB only, so measure a longer region"
        }
        _ => "no gain; leave mr_slice out",
    };
    Check::ok(WRITE_RATE, format!("{found}\n{:20}{advice}", ""))
}

fn rates(address: SocketAddr, region_bytes: u64) -> anyhow::Result<Rates> {
    let memory = RegionMemory::anonymous(region_bytes, HugePages::Never)?;
    memory.reserve().context("allocating the region")?;
    let mut whole = Registered::new(address, &memory.region, None)?;
    let mut slices = Registered::new(address, &memory.region, Some(slice_bytes(region_bytes)))?;
    let mut best = Rates { whole: 0.0, slices: 0.0 };
    for _ in 0..TURNS {
        best.whole = best.whole.max(whole.write_rate(region_bytes, TURN)?);
        best.slices = best.slices.max(slices.write_rate(region_bytes, TURN)?);
    }
    Ok(best)
}

/// A registration, and a queue pair that uses it.
struct Registered {
    loopback: Loopback,
    /// Dropped after the queue pair.
    _protection: Protection,
}

impl Registered {
    fn new(
        address: SocketAddr,
        region: &Arc<Region>,
        slice_bytes: Option<u64>,
    ) -> anyhow::Result<Self> {
        let protection = Protection::in_slices(address, region, Role::Writer, slice_bytes)?;
        let loopback = protection.loopback(LANES, &Options::default())?;
        Ok(Self { loopback, _protection: protection })
    }

    fn write_rate(&mut self, region_bytes: u64, time: Duration) -> Result<f64, ChainError> {
        write_rate(&mut self.loopback.fabric, region_bytes, time)
    }
}

/// Keeps all lanes busy with WRITEs for this time. Returns the bytes a second.
fn write_rate(
    fabric: &mut impl Fabric,
    region_bytes: u64,
    time: Duration,
) -> Result<f64, ChainError> {
    let targets = region_bytes / u64::from(WRITE_BYTES);
    let mut target = 0;
    let mut free: Vec<LaneId> = (0..LANES).map(LaneId).collect();
    for lane in &free {
        fabric.reserve(*lane, Buffer::NewBlock, WRITE_BYTES as usize);
    }
    let (started, mut written) = (fabric.now(), 0);
    let end = started + time.as_nanos() as u64;
    let mut in_flight = 0;
    loop {
        if fabric.now() < end {
            for lane in free.drain(..) {
                target = (target + STRIDE) % targets;
                let remote = target * u64::from(WRITE_BYTES);
                let write = Verb::Write { remote, from: Buffer::NewBlock, bytes: WRITE_BYTES };
                let lateness_max_ns = fabric.timing(RegionIndex::FIRST).lateness_max_ns;
                let deadline = fabric.now() + lateness_max_ns;
                fabric.post(lane, RegionIndex::FIRST, &[write], deadline);
                in_flight += 1;
            }
        } else if in_flight == 0 {
            break;
        }
        fabric.ring();
        while let Some(completion) = fabric.poll() {
            match completion.result {
                Ok(_) => written += u64::from(WRITE_BYTES),
                // The system did not run this thread in time.
                Err(ChainError::Late) => {}
                Err(error) => return Err(error),
            }
            free.push(completion.lane);
            in_flight -= 1;
        }
        if free.is_empty() || fabric.now() >= end {
            fabric.relax();
        }
    }
    let seconds = (fabric.now() - started) as f64 / 1e9;
    Ok(written as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use farside_fabric::shm::ShmFabric;

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_advice_follows_the_figures() {
        let line = |region_bytes, whole, slices| {
            let check = conclusion("mlx5_0", region_bytes, Rates { whole, slices });
            check.line()
        };
        let gain = line(8 * GIB, 5.5 * GIB as f64, 10.0 * GIB as f64);
        assert!(gain.starts_with("warn  WRITE rate"), "{gain}");
        for part in [
            "mlx5_0: 5.5 GiB/s into one memory region of 8GiB, 10.0 GiB/s into 2 slices \
                      of 4GiB",
            "mr_slice = \"4GiB\"",
            "huge pages",
        ] {
            assert!(gain.contains(part), "{gain}");
        }
        let none = line(8 * GIB, 10.0 * GIB as f64, 10.1 * GIB as f64);
        assert!(none.starts_with("ok ") && none.contains("leave mr_slice out"), "{none}");
        let short = line(GIB, GIB as f64, GIB as f64);
        assert!(short.contains("4 slices of 256MiB") && short.contains("above 4 GiB"), "{short}");
        assert!([gain, none, short].iter().all(|lines| lines.lines().count() == 2));
    }

    #[test]
    fn without_device_or_memory_nothing_is_measured() {
        let line = measure(&Report::default(), 8 * GIB, Some(64 * GIB)).line();
        assert!(line.contains("not measured: no RDMA device"), "{line}");
        let line = too_little_memory(8 * GIB, Some(8 * GIB)).unwrap().line();
        assert!(line.contains("it takes 8.5 GiB, and 8.0 GiB are available"), "{line}");
        assert!(line.contains("--measure SIZE"), "{line}");
        assert_eq!(too_little_memory(8 * GIB, Some(9 * GIB)), None);
    }

    #[test]
    fn every_region_has_several_valid_slices() {
        for region in [16 << 20, 18 << 20, 100 << 20, GIB, 8 * GIB, 100 * GIB, 256 * GIB] {
            let slice = slice_bytes(region);
            let count = slice_count(region, slice);
            assert!(slice.is_multiple_of(2 << 20) && (2..=16).contains(&count), "{region}");
        }
        assert_eq!(slice_bytes(8 * GIB), 4 * GIB);
    }

    #[test]
    fn the_rate_is_that_of_writes_all_over_the_region() {
        let file = tempfile::tempfile().unwrap();
        let region_bytes = 16 * u64::from(WRITE_BYTES);
        file.set_len(region_bytes).unwrap();
        let region = Arc::new(Region::map(&file).unwrap());
        let mut fabric = ShmFabric::new(region.clone(), None, LANES);
        for lane in 0..LANES {
            fabric.reserve(LaneId(lane), Buffer::NewBlock, WRITE_BYTES as usize);
            fabric.buffer_mut(LaneId(lane), Buffer::NewBlock).fill(7);
        }
        let rate = write_rate(&mut fabric, region_bytes, Duration::from_millis(20)).unwrap();
        assert!(rate > 0.0);
        let words = (0..region_bytes).step_by(WRITE_BYTES as usize);
        assert!(words.into_iter().all(|at| region.load(at) == Ok(0x0707_0707_0707_0707)));
    }
}
