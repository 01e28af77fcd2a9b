//! Landlock: which files a server may touch, and that it reaches nobody.

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::path::Path;

/// The newest rules that were tried. Older kernels take those of them that they have.
const NEWEST: ABI = ABI::V7;

/// What tells a known user from an unknown one.
const OVERFLOW_UID: &str = "/proc/sys/kernel/overflowuid";

/// Leaves a server its socket directory, where it removes its sockets when it ends without a launcher, and opens lock
/// files; no other file, no TCP port, no abstract socket and no process but its own. What is open stays open. Returns
/// the version of the rules.
pub fn restrict(dir: &Path) -> Result<u8, String> {
    let status = rules(dir).map_err(|error| format!("no landlock: {error}"))?;
    match status {
        (RulesetStatus::NotEnforced, LandlockStatus::NotEnabled) => {
            Err("no landlock: the kernel has it, and was started without".to_owned())
        }
        (RulesetStatus::NotEnforced, _) => {
            Err("no landlock: the kernel is older than 5.13, or a container forbids it".to_owned())
        }
        (_, LandlockStatus::Available { effective_abi, .. }) => Ok(effective_abi.min(NEWEST) as u8),
        (_, other) => Err(format!("no landlock: {other:?}")),
    }
}

fn rules(dir: &Path) -> Result<(RulesetStatus, LandlockStatus), RulesetError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let in_dir = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::RemoveFile;
    let allowed: [(&Path, BitFlags<AccessFs>); 2] = [
        (dir, in_dir),
        (Path::new(OVERFLOW_UID), AccessFs::ReadFile.into()),
    ];
    for (path, access) in allowed {
        // What cannot be opened now is not missed later.
        if let Ok(path) = PathFd::new(path) {
            ruleset = ruleset.add_rule(PathBeneath::new(path, access))?;
        }
    }
    let status = ruleset.restrict_self()?;
    Ok((status.ruleset, status.landlock))
}
