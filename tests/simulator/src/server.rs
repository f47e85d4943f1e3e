//! The server's chores beside clients that operate. They are production code over an endpoint of
//! the server.

use std::cell::RefCell;
use std::rc::Rc;

use farside_fabric::{Buffer, LaneId, Nanos, RegionIndex, Verb};
use farside_layout::{BlockRef, ROW_BYTES, Row, STATE_OFFSET, SlotWord, slot_in_subtable};
use farside_protocol::split::{SplitProgress, SubtableSplitter};
use farside_protocol::sweep::clear_left_by;
use zerocopy::FromBytes;

use super::session::TestSession;

use super::fabric::{PAUSE_NS_MAX, SimFabric};
use super::mutant::Mutant;
use super::task::{Event, Events, begin};
use super::world::World;

/// A task that the server does once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chore {
    Split,
    /// Splits the subtable that key 0 is in after the first split. One half goes into the place
    /// that the first split emptied: key 0's half if `key_0_returns`.
    Reuse {
        key_0_returns: bool,
    },
    /// Clears the slots of lost clients.
    Sweep,
}

/// Does the server's chores one after another. Before each one it waits to be polled.
pub(super) async fn run_chores(
    session: Rc<TestSession<SimFabric>>,
    world: Rc<RefCell<World>>,
    (chores, lanes): (Vec<Chore>, u16),
    events: Events,
) {
    for chore in chores {
        begin().await;
        let event = match chore {
            Chore::Split => split(&session, &world, lanes, None).await,
            Chore::Reuse { key_0_returns } => {
                split(&session, &world, lanes, Some(key_0_returns)).await
            }
            Chore::Sweep => sweep(&session, &world).await,
        };
        events.borrow_mut().extend([event, Event::Skip]);
    }
    events.borrow_mut().push_back(Event::Over);
}

/// Makes the first split. With `reuse`, waits until no client believes a READ from before that
/// split, and makes the next one, into the emptied place. `reuse` says whether key 0 returns to
/// that place.
async fn split(
    session: &TestSession<SimFabric>,
    world: &RefCell<World>,
    lanes: u16,
    reuse: Option<bool>,
) -> Event {
    let (region, depth, rests) = {
        let world = world.borrow();
        let depth = world.memory.word(STATE_OFFSET) >> 32;
        (world.region.clone(), depth as u8, world.places_rest)
    };
    let (endpoint, lane) = (session.endpoint(), LaneId(0));
    let splitter = SubtableSplitter::new(endpoint, RegionIndex::FIRST, lanes, &region.format);
    let splitter = splitter.with_part(region.rows(), region.usable());
    let reach = "the fabric reaches all of it";
    let mut split = region.split();
    if let Some(key_0_returns) = reuse {
        splitter.disown(&split).await.expect(reach);
        if rests {
            endpoint.sleep_until(lane, endpoint.now() + session.constants()[0]).await;
        } else {
            world.borrow_mut().note_fired(Mutant::ReusedAtOnce);
        }
        while !splitter.vacate(split.old).await.expect(reach) {
            endpoint.sleep_until(lane, endpoint.now() + PAUSE_NS_MAX).await;
        }
        split = region.next_split(key_0_returns);
    }
    let progress = splitter.split(&split).await.expect(reach);
    if progress == SplitProgress::Done {
        splitter.publish(&split, depth).await.expect("there is a directory that deep");
    }
    Event::Split(progress)
}

/// Clears the slots that fenced clients left unfinished in the rows of the keys' windows.
async fn sweep(session: &TestSession<SimFabric>, world: &RefCell<World>) -> Event {
    let (region, clients) = {
        let mut world = world.borrow_mut();
        (world.region.clone(), std::mem::take(&mut world.fenced))
    };
    let endpoint = session.endpoint();
    let read = async |remote: u64, bytes: u64| {
        let read = [Verb::Read { remote, into: Buffer::ReadBlock, bytes: bytes as u32 }];
        endpoint.chain(LaneId(0), RegionIndex::FIRST, &read, Nanos::MAX).await?;
        Ok(endpoint.buffer(LaneId(0), Buffer::ReadBlock)[..bytes as usize].to_vec())
    };
    let rows = region.rows();
    for place in region.places() {
        let bytes = rows.len() as u64 * ROW_BYTES;
        let image = read(place + rows.start as u64 * ROW_BYTES, bytes).await;
        let image = image.expect("the fabric reaches all of it");
        let image = <[Row]>::ref_from_bytes(&image).expect("whole rows");
        let mut slots: Vec<(u64, SlotWord)> = Vec::new();
        for (number, row) in rows.clone().zip(image) {
            let offset = |at| place + slot_in_subtable(number, at);
            slots.extend(row.slots.iter().enumerate().map(|(at, slot)| (offset(at), slot.word())));
        }
        for slot in slots {
            let block_of = async |block: BlockRef| {
                read(block.address.offset(), block.class.block_bytes()).await
            };
            clear_left_by(
                (endpoint, RegionIndex::FIRST),
                &region.geometry,
                &clients,
                slot,
                block_of,
            )
            .await
            .expect("the fabric reaches all of it");
        }
    }
    Event::Swept(clients)
}
