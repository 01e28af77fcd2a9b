//! The names of sockets.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use weightd_core::content::{DeviceUuid, Role};

/// The longest path of a socket in bytes: `sun_path` holds 108, the last of which ends the string
/// (unix(7)).
pub const MAX_PATH_BYTES: usize = 107;

/// The socket of one daemon: `DIR/weightd_{32 hex digits}{_sSLOT}{_INSTANCE}{_draft}.sock`.
///
/// `slot` is given only where several ranks share a device. `instance` is 1 to 32 letters, digits
/// and dashes, and neither `draft` nor `s` with digits alone after it, so that no two daemons have
/// one name ([`check_instance`]).
///
/// # Errors
/// An instance of another form, or a path over [`MAX_PATH_BYTES`].
pub fn socket_path(
    dir: &Path,
    device: &DeviceUuid,
    slot: Option<u32>,
    instance: Option<&str>,
    role: Role,
) -> Result<PathBuf, PathError> {
    if let Some(name) = instance {
        check_instance(name)?;
    }
    let path = dir.join(file_name(device, slot, instance, role));
    check_length(&path)?;
    Ok(path)
}

/// The private socket of a launcher and its server: `DIR/weightd-control_{16 hex digits}.sock`,
/// the digits being any number that nobody else uses.
///
/// # Errors
/// A path over [`MAX_PATH_BYTES`].
pub fn control_path(dir: &Path, number: u64) -> Result<PathBuf, PathError> {
    let path = dir.join(format!("weightd-control_{number:016x}.sock"));
    check_length(&path)?;
    Ok(path)
}

/// Whether a socket's address can hold this path.
pub fn check_length(path: &Path) -> Result<(), PathError> {
    let bytes = path.as_os_str().as_bytes().len();
    if bytes > MAX_PATH_BYTES {
        return Err(PathError::TooLong {
            path: path.to_owned(),
            bytes,
        });
    }
    Ok(())
}

/// Why there can be no such socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The address has no room for it.
    #[error(
        "socket path {} has {bytes} bytes and the system allows {MAX_PATH_BYTES}: name a shorter --socket-dir or --instance",
        path.display()
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The instance's name has another form.
    #[error("instance name {name:?} must be 1 to 32 letters, digits and dashes")]
    Instance {
        /// The name.
        name: String,
    },
    /// The instance's name reads like another part of the path.
    #[error(
        "instance name {name:?} could be taken for a role or a slot: choose another than draft, s0, s1, ..."
    )]
    Ambiguous {
        /// The name.
        name: String,
    },
}

/// What a daemon's socket says about it by its name alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// The device that holds the content.
    pub device: DeviceUuid,
    /// Which of several ranks on that device.
    pub slot: Option<u32>,
    /// The operator's name for this set of daemons.
    pub instance: Option<String>,
    /// Target or draft.
    pub role: Role,
}

impl Named {
    /// Reads a file name that [`socket_path`] made; `None` for any other.
    pub fn from_path(path: &Path) -> Option<Named> {
        let name = path.file_name()?.to_str()?;
        let stem = name.strip_prefix("weightd_")?.strip_suffix(".sock")?;
        let mut parts = stem.split('_').peekable();
        let device = parts.next().filter(|hex| hex.len() == 32)?;
        let device = DeviceUuid(u128::from_str_radix(device, 16).ok()?.to_be_bytes());
        let slot = parts
            .next_if(|part| is_slot(part))
            .map(|part| part[1..].parse())
            .transpose()
            .ok()?;
        let instance = parts
            .next_if(|part| check_instance(part).is_ok())
            .map(str::to_owned);
        let role = parts.next_if_eq(&"draft").map_or(Role::Target, |_| Role::Draft);
        // Writing it again refuses what is left over, and other spellings of the same numbers.
        (file_name(&device, slot, instance.as_deref(), role) == name).then_some(Named {
            device,
            slot,
            instance,
            role,
        })
    }
}

/// Every daemon's socket in a directory, sorted; whether anybody serves them is not asked.
pub fn list(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    use std::os::unix::fs::FileTypeExt;
    let mut sockets = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        // A file that went meanwhile is no socket either.
        if Named::from_path(&path).is_some() && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            sockets.push(path);
        }
    }
    sockets.sort();
    Ok(sockets)
}

fn file_name(device: &DeviceUuid, slot: Option<u32>, instance: Option<&str>, role: Role) -> String {
    let mut name = format!("weightd_{device}");
    if let Some(slot) = slot {
        name.push_str(&format!("_s{slot}"));
    }
    if let Some(instance) = instance {
        name.push('_');
        name.push_str(instance);
    }
    if role == Role::Draft {
        name.push_str("_draft");
    }
    name.push_str(".sock");
    name
}

/// Whether an instance can have this name.
pub fn check_instance(name: &str) -> Result<(), PathError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if !(1..=32).contains(&name.len()) || !name.bytes().all(allowed) {
        return Err(PathError::Instance {
            name: name.to_owned(),
        });
    }
    if name == "draft" || is_slot(name) {
        return Err(PathError::Ambiguous {
            name: name.to_owned(),
        });
    }
    Ok(())
}

fn is_slot(part: &str) -> bool {
    let digits = part.strip_prefix('s').unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEVICE: DeviceUuid = DeviceUuid([0xab; 16]);

    #[test]
    fn each_part_shows_only_where_it_is_given() {
        let path =
            |slot, instance, role| socket_path(Path::new("/d"), &DEVICE, slot, instance, role).unwrap();
        let hex = "ab".repeat(16);
        let expected = |rest| PathBuf::from(format!("/d/weightd_{hex}{rest}.sock"));
        assert_eq!(path(None, None, Role::Target), expected(""));
        assert_eq!(path(None, None, Role::Draft), expected("_draft"));
        assert_eq!(path(Some(0), None, Role::Target), expected("_s0"));
        assert_eq!(
            path(Some(3), Some("blue-2"), Role::Draft),
            expected("_s3_blue-2_draft")
        );
    }

    #[test]
    fn a_path_of_107_bytes_fits_and_one_of_108_does_not() {
        let name = file_name(&DEVICE, None, None, Role::Target).len();
        let dir = |bytes: usize| PathBuf::from(format!("/{}", "d".repeat(bytes - name - 2)));
        let path = |bytes| socket_path(&dir(bytes), &DEVICE, None, None, Role::Target);
        assert_eq!(path(107).unwrap().as_os_str().len(), 107);
        assert!(matches!(path(108), Err(PathError::TooLong { bytes: 108, .. })));
        assert!(control_path(&dir(107), u64::MAX).is_ok());
        assert!(control_path(&dir(150), 1).is_err());
    }

    #[test]
    fn instance_names_that_could_be_read_as_another_part_are_refused() {
        let refused =
            |name| socket_path(Path::new("/d"), &DEVICE, None, Some(name), Role::Target).unwrap_err();
        for name in ["draft", "s0", "s1", "s01", "s99999999999"] {
            assert_eq!(
                refused(name),
                PathError::Ambiguous {
                    name: name.to_owned()
                }
            );
        }
        for name in ["", "a_b", "a/b", "..", "é", "a b", "a\0", &"x".repeat(33)] {
            assert_eq!(
                refused(name),
                PathError::Instance {
                    name: name.to_owned()
                }
            );
        }
        for name in ["s", "Draft", "s1a", "drafts", "-", &"x".repeat(32)] {
            assert_eq!(check_instance(name), Ok(()));
        }
    }

    #[test]
    fn only_sockets_of_daemons_are_listed_and_in_order() {
        let temp = tempfile::tempdir().unwrap();
        let path = |slot| socket_path(temp.path(), &DEVICE, Some(slot), None, Role::Target).unwrap();
        let control = control_path(temp.path(), 7).unwrap();
        let bind = |path: &Path| drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        bind(&path(2));
        bind(&path(1));
        bind(&control);
        bind(&path(1).with_extension("tmp"));
        std::fs::write(path(3), "no socket").unwrap();
        std::fs::write(temp.path().join("weightd_x.sock"), "").unwrap();
        assert_eq!(list(temp.path()).unwrap(), [path(1), path(2)]);
        assert!(list(&temp.path().join("absent")).is_err());
    }

    fn instances() -> impl Strategy<Value = Option<String>> {
        prop::option::of("[a-z0-9-]{1,3}|draft|s[0-9]{1,2}|[A-Za-z0-9-]{32}")
    }

    proptest! {
        #[test]
        fn a_name_tells_everything_that_it_was_made_of(
            uuid: [u8; 16], slot: Option<u32>, instance in instances(), draft: bool,
        ) {
            let device = DeviceUuid(uuid);
            let role = if draft { Role::Draft } else { Role::Target };
            if let Ok(path) = socket_path(Path::new("/d"), &device, slot, instance.as_deref(), role) {
                prop_assert_eq!(Named::from_path(&path), Some(Named { device, slot, instance, role }));
            } else {
                prop_assert!(check_instance(&instance.unwrap()).is_err());
            }
        }

        #[test]
        fn what_reads_as_a_name_is_written_as_that_name(
            name in "weightd_[0-9a-fA-F+]{32}(_s?[0-9]{1,11}|_draft|_[a-z]{0,3}){0,4}\\.sock",
        ) {
            if let Some(named) = Named::from_path(Path::new(&name)) {
                prop_assert_eq!(file_name(&named.device, named.slot, named.instance.as_deref(), named.role), name);
            }
        }
    }
}
