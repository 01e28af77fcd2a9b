//! What a server gave up when it started.

use speedy::{Readable, Writable};
use std::fmt;

/// What a serving process gave up, so that whoever gets hold of it finds little: all of it, unless its kernel
/// lacks something. Displayed for a person, what is missing last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Readable, Writable)]
pub struct Confinement {
    /// No program that it starts can gain privileges.
    pub no_new_privileges: bool,
    /// Its memory is never dumped, and no other process of its user may look into it.
    pub no_core_dumps: bool,
    /// The version (ABI) of Landlock that keeps it to its socket directory.
    pub landlock: Option<u8>,
    /// Whether the kernel refuses it the system calls that serving does not need (seccomp).
    pub seccomp: bool,
}

impl Confinement {
    /// Each: whether it is there, how it is called, and how it is called where it is missing.
    fn parts(self) -> [(bool, String, &'static str); 4] {
        let version = self.landlock.unwrap_or(0);
        let landlock = format!("landlock (ABI {version})");
        [
            (
                self.no_new_privileges,
                "no new privileges".to_owned(),
                "no_new_privs",
            ),
            (self.no_core_dumps, "no core dumps".to_owned(), "core dumps off"),
            (self.landlock.is_some(), landlock, "landlock"),
            (self.seccomp, "seccomp".to_owned(), "seccomp"),
        ]
    }

    /// What the kernel did not give; empty where nothing is missing.
    pub fn missing(self) -> Vec<&'static str> {
        let missing = self.parts().into_iter().filter(|(has, ..)| !has);
        missing.map(|(.., name)| name).collect()
    }
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = self.parts().into_iter().filter(|(has, ..)| *has);
        let has: Vec<String> = has.map(|(_, name, _)| name).collect();
        match (has.join(", "), self.missing().join(", ")) {
            (has, missing) if missing.is_empty() => f.write_str(&has),
            (has, missing) if has.is_empty() => write!(f, "nothing; missing: {missing}"),
            (has, missing) => write!(f, "{has}; missing: {missing}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        let whole = Confinement {
            no_new_privileges: true,
            no_core_dumps: true,
            landlock: Some(7),
            seccomp: true,
        };
        assert_eq!(whole.missing(), [""; 0]);
        assert_eq!(
            whole.to_string(),
            "no new privileges, no core dumps, landlock (ABI 7), seccomp"
        );
        let without = Confinement {
            landlock: None,
            ..whole
        };
        assert_eq!(without.missing(), ["landlock"]);
        assert_eq!(
            without.to_string(),
            "no new privileges, no core dumps, seccomp; missing: landlock"
        );
        assert_eq!(
            Confinement::default().to_string(),
            "nothing; missing: no_new_privs, core dumps off, landlock, seccomp"
        );
    }
}
