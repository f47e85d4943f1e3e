//! Where clients come in, whichever the fabric.

use std::os::fd::{AsFd, BorrowedFd};

use super::device::Device;
use super::socket::Socket;

/// Where clients come in.
pub(super) enum Door {
    Socket(Socket),
    Device(Device),
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(socket) => socket.as_fd(),
            Self::Device(device) => device.as_fd(),
        }
    }
}
