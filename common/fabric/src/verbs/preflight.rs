//! Questions to devices about their capabilities.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::ffi::{self, constructed, device_name, ibv, system};
use super::identifier::CmId;
use crate::rdma::{Capabilities, Device, VerbsError};

/// The devices of the system, which are valid while this lives.
struct DeviceList {
    first: NonNull<*mut ffi::ibv_device>,
    count: usize,
}

impl DeviceList {
    fn new() -> io::Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: the target is writable.
        let first = constructed(unsafe { ffi::ibv_get_device_list(&raw mut count) })?;
        Ok(Self { first, count: count.max(0) as usize })
    }

    fn devices(&self) -> &[*mut ffi::ibv_device] {
        // SAFETY: the library's list, which has `count` entries.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list is from ibv_get_device_list and freed once.
        unsafe { ffi::ibv_free_device_list(self.first.as_ptr()) };
    }
}

/// A device opened for questions.
struct Context(NonNull<ffi::ibv_context>);

impl Context {
    fn open(device: *mut ffi::ibv_device) -> io::Result<Self> {
        // SAFETY: the device is of a list that is not yet freed.
        Ok(Self(constructed(unsafe { ffi::ibv_open_device(device) })?))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is opened and closed once, and no object was made from it.
        let _ = unsafe { ffi::ibv_close_device(self.0.as_ptr()) };
    }
}

/// Asks each of these devices that can be opened. Stores its capabilities, and the active MTU of
/// each of its ports.
pub(crate) fn ask_all(devices: &mut [Device]) -> io::Result<()> {
    let list = DeviceList::new()?;
    for raw in list.devices() {
        let name = device_name(*raw);
        let Some(device) = devices.iter_mut().find(|device| device.name == name) else { continue };
        let Ok(context) = Context::open(*raw) else { continue };
        if let Ok(attributes) = attributes(context.0) {
            device.capabilities = Some(Capabilities {
                atomics: attributes.atomic_cap != ffi::ibv_atomic_cap::IBV_ATOMIC_NONE,
                max_qp_rd_atom: attributes.max_qp_rd_atom.max(0) as u32,
                max_qp_init_rd_atom: attributes.max_qp_init_rd_atom.max(0) as u32,
                max_mr_bytes: attributes.max_mr_size,
            });
        }
        for port in &mut device.ports {
            port.mtu_bytes = active_mtu(context.0, port.number);
        }
    }
    Ok(())
}

fn active_mtu(context: NonNull<ffi::ibv_context>, port: u8) -> Option<u32> {
    // SAFETY: a structure of numbers.
    let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_port_attr>() };
    // SAFETY: the context is open, and the target writable and as long as the library's.
    let asked = unsafe { ffi::___ibv_query_port(context.as_ptr(), port, &raw mut attributes) };
    ibv(asked).ok()?;
    // IBV_MTU_256 is 1, and each following number means twice as much.
    (1..=5).contains(&attributes.active_mtu).then(|| 128 << attributes.active_mtu)
}

/// The capabilities of an identifier's device.
pub(super) fn query(id: &Arc<CmId>) -> Result<ffi::ibv_device_attr, VerbsError> {
    let context = id.device().ok_or(VerbsError::OtherDevice)?;
    attributes(context).map_err(system("asking the device"))
}

fn attributes(context: NonNull<ffi::ibv_context>) -> io::Result<ffi::ibv_device_attr> {
    // SAFETY: a structure of numbers.
    let mut attributes = unsafe { ffi::zeroed::<ffi::ibv_device_attr>() };
    // SAFETY: the context is open, and the target writable.
    ibv(unsafe { ffi::ibv_query_device(context.as_ptr(), &raw mut attributes) })?;
    Ok(attributes)
}
