//! The module `fabric::verbs` has the same names and signatures with and without RDMA in the build:
//! this file compiles in both. Without it, everything says that it is not there.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

use farside_fabric::Role;
use farside_fabric::shm::Region;
use farside_fabric::verbs::*;
use farside_fabric::{ControlChannel, Fabric};

type Made<T> = Result<T, VerbsError>;
type WithReply<T> = (T, Vec<u8>);

fn is_fabric<T: Fabric + Send>() {}
fn is_channel<T: ControlChannel>() {}
fn is_pollable<T: AsFd + Send>() {}

#[test]
fn both_have_these_signatures() {
    let _: fn(SocketAddr, &[u8], &Options) -> Made<WithReply<VerbsChannel>> = connect_control;
    let _: fn(SocketAddr, &[u8], u16, &Options) -> Made<DataLink> = connect_data;
    let _: fn(DataLink, RemoteRegion) -> Made<VerbsFabric> = DataLink::into_fabric;
    let _: fn(&DataLink) -> &[u8] = DataLink::reply;
    let _: fn(&VerbsFabric) -> bool = VerbsFabric::is_broken;
    let _: fn(&VerbsChannel) -> ConnectionId = VerbsChannel::id;
    let _: fn(SocketAddr, &Options) -> Made<Listener> = Listener::bind;
    let _: fn(&Listener) -> Option<SocketAddr> = Listener::local_address;
    let _: fn(&mut Listener) -> io::Result<Option<Event>> = Listener::next_event;
    let _: fn(&Incoming) -> &[u8] = Incoming::private_data;
    let _: fn(&Incoming) -> ConnectionId = Incoming::id;
    let _: fn(Incoming, &[u8]) -> Made<()> = Incoming::reject;
    let _: fn(Incoming, &[u8]) -> Made<VerbsChannel> = Incoming::accept_control;
    let _: fn(Incoming, &Protection, &[u8]) -> Made<DataConnection> = Incoming::accept_data;
    let _: fn(&Incoming, &Arc<Region>, Role) -> Made<Protection> = Protection::new;
    let _: fn(SocketAddr, &Arc<Region>, Role) -> Made<Protection> = Protection::at;
    let _: fn(&Protection) -> RemoteRegion = Protection::remote;
    let _: fn(&Protection, &Incoming) -> bool = Protection::serves;
    let _: fn(&Protection, u16, &Options) -> Made<Loopback> = Protection::loopback;
    let _: fn(&Protection, Listener, u16, &Options) -> Made<Loopback> = Protection::loopback_over;
    let _: fn(&mut DataConnection) -> io::Result<()> = DataConnection::probe;
    let _: fn(&mut DataConnection) -> io::Result<ProbeState> = DataConnection::probe_state;
    let _: fn(&DataConnection) -> ConnectionId = DataConnection::id;
    let _: fn() -> Report = preflight;
    let _ = |event: Event| match event {
        Event::Request(_) => {}
        Event::Established(ConnectionId(_))
        | Event::Disconnected(ConnectionId(_))
        | Event::DeviceRemoved(ConnectionId(_)) => {}
    };
    let _ = |loopback: Loopback| loopback.fabric;
    is_fabric::<VerbsFabric>();
    is_channel::<VerbsChannel>();
    is_pollable::<Listener>();
    is_pollable::<DataConnection>();
}

/// Where there is no device, or no RDMA in the build, this is said at once and in one way.
#[test]
fn without_a_device_every_connection_says_so() {
    if !preflight().devices.is_empty() {
        return;
    }
    let (address, options) = (SocketAddr::from(([127, 0, 0, 1], 7400)), Options::default());
    let errors = [
        connect_control(address, b"", &options).err(),
        connect_data(address, b"", 1, &options).err(),
        Listener::bind(address, &options).err(),
    ];
    for error in errors.map(|error| error.map(|error| (error.is_passing(), error))) {
        let Some((false, VerbsError::NotBuilt | VerbsError::NoDevice { .. })) = error else {
            panic!("{error:?}");
        };
    }
    assert!(!preflight().findings.is_empty());
}
