//! Who we are, and who the peer of a connection is.

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::process::geteuid;
use std::io;
use std::os::fd::AsFd;
use weightd_core::peer::{OVERFLOW_UID, Peer};

/// Our effective uid: the owner of what we create, and what a peer sees of us.
///
/// To be handed to [`Peer::is_trusted_by`]. The overflow uid is refused here once and for all, as
/// the kernel is set up now, so that a peer of our uid is always a user that the kernel can name.
///
/// # Errors
/// Where we run as the overflow uid ourselves and cannot tell our user from any unmapped one.
pub fn our_uid() -> Result<u32, OverflowUid> {
    let uid = geteuid().as_raw();
    let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    let overflow = text
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(OVERFLOW_UID);
    if uid == overflow || uid == OVERFLOW_UID {
        return Err(OverflowUid { uid });
    }
    Ok(uid)
}

/// We run as the user behind which every unmapped user stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this process runs as uid {uid}, which the kernel also shows for every user unknown to this namespace, \
     so that no peer can be told from a stranger: run it as a user of its own"
)]
pub struct OverflowUid {
    /// The uid in question.
    pub uid: u32,
}

/// The other side of a connected socket, as the kernel recorded it at `connect` or `listen`.
///
/// The pid is 0 for a peer in a pid namespace that ours does not contain, as between two
/// containers.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let credentials = getsockopt(&socket, PeerCredentials)?;
    Ok(Peer {
        pid: u32::try_from(credentials.pid()).unwrap_or(0),
        uid: credentials.uid(),
    })
}
