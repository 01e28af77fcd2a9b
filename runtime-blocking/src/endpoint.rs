//! Where a daemon is found.

use crate::line::Line;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use weightd_core::content::{DeviceUuid, Role};
use weightd_core::machine::ConnectFailure;
use weightd_core::peer::Peer;
use weightd_socket::dir::{DirError, SocketDir};
use weightd_socket::path::{PathError, check_length, socket_path};

/// The environment variable that names the socket directory.
pub const SOCKET_DIR_VARIABLE: &str = "WEIGHTD_SOCKET_DIR";

/// Where a daemon is, whether or not it is there yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(Place);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Socket(PathBuf),
    /// The directory is looked at anew for each connection: a launcher may have yet to make it.
    Dir {
        named: Option<PathBuf>,
        variable: Option<OsString>,
        file: PathBuf,
    },
}

impl Endpoint {
    /// The daemon behind this socket.
    ///
    /// # Errors
    /// A path that is too long for a socket.
    pub fn socket(path: &Path) -> Result<Endpoint, PathError> {
        let path = absolute(path);
        check_length(&path)?;
        Ok(Endpoint(Place::Socket(path)))
    }

    /// The daemon of a device: in the directory that is named, else in `$WEIGHTD_SOCKET_DIR`, else in
    /// `/tmp/weightd-UID`. `slot` is for several ranks on one device.
    ///
    /// # Errors
    /// An instance that is no name, or a path that is too long for a socket.
    pub(crate) fn of_device(
        named: Option<&Path>,
        device: &DeviceUuid,
        slot: Option<u32>,
        instance: Option<&str>,
        role: Role,
    ) -> Result<Endpoint, PathError> {
        let variable = std::env::var_os(SOCKET_DIR_VARIABLE).filter(|variable| !variable.is_empty());
        let named = named.map(absolute);
        let variable = variable.map(|variable| absolute(Path::new(&variable)));
        let file = socket_path(Path::new(""), device, slot, instance, role)?;
        if let Some(dir) = named.as_ref().or(variable.as_ref()) {
            check_length(&dir.join(&file))?;
        }
        Ok(Endpoint(Place::Dir {
            named,
            variable: variable.map(PathBuf::into_os_string),
            file,
        }))
    }

    /// Connects a line to it. A directory that others could have prepared is refused.
    pub(crate) fn connect(&self, line: &mut Line) -> Result<Peer, ConnectFailure> {
        match &self.0 {
            Place::Socket(socket) => line.connect(socket),
            Place::Dir {
                named,
                variable,
                file,
            } => match SocketDir::open(named.as_deref(), variable.as_deref()) {
                Ok(dir) => line.connect(&dir.path().join(file)),
                Err(error @ DirError::Absent { .. }) => Err(ConnectFailure::Absent(error.to_string())),
                Err(error @ DirError::Io(_)) => Err(ConnectFailure::Other(error.to_string())),
                Err(error) => Err(ConnectFailure::Refused(error.to_string())),
            },
        }
    }
}

/// The same place wherever this process goes. One that cannot be told stays as it is, and is refused later.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
