//! Descriptors with a ledger: a machine may hold, send or discard one, never lose it.

use crate::peer::{Facts, FileKind};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

/// The file behind descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct File(pub u32);

#[derive(Debug, Default)]
struct Books {
    next: u32,
    live: BTreeMap<u32, File>,
    /// Descriptors that a server or a vault dropped instead of discarding them.
    lost: Vec<File>,
    lenient: bool,
}

/// Who has which descriptor.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Rc<RefCell<Books>>);

/// A descriptor. While it is `strict`, dropping it is a fault.
pub struct Fd {
    id: u32,
    pub file: File,
    pub facts: Facts,
    strict: bool,
    ledger: Ledger,
}

impl Ledger {
    /// A new file with one descriptor.
    pub fn open(&self, facts: Facts) -> Fd {
        let id = self.0.borrow().next;
        self.add(File(id), facts)
    }

    pub fn memory(&self, bytes: u64) -> Fd {
        self.open(Facts {
            file: FileKind::Memory { sealed: true },
            size: bytes,
        })
    }

    /// The lock file of a socket.
    pub fn lock(&self) -> Fd {
        self.open(Facts {
            file: FileKind::Other,
            size: 0,
        })
    }

    pub fn listener(&self) -> Fd {
        self.open(Facts {
            file: FileKind::Listener,
            size: 0,
        })
    }

    /// How many descriptors of this file are open anywhere.
    pub fn open_of(&self, file: File) -> usize {
        self.0.borrow().live.values().filter(|of| **of == file).count()
    }

    pub fn open_in_all(&self) -> usize {
        self.0.borrow().live.len()
    }

    /// What dies with a process is closed by the kernel, so dropping is no fault there.
    pub fn killing<T>(&self, process: T) {
        self.0.borrow_mut().lenient = true;
        drop(process);
        self.0.borrow_mut().lenient = false;
    }

    /// The descriptors that were dropped and not discarded.
    pub fn lost(&self) -> Vec<File> {
        self.0.borrow().lost.clone()
    }

    fn add(&self, file: File, facts: Facts) -> Fd {
        let mut books = self.0.borrow_mut();
        let id = books.next;
        books.next += 1;
        books.live.insert(id, file);
        Fd {
            id,
            file,
            facts,
            strict: false,
            ledger: self.clone(),
        }
    }
}

impl Fd {
    /// Another descriptor of the same file.
    pub fn duplicate(&self) -> Fd {
        self.ledger.add(self.file, self.facts)
    }

    /// From now on it must be discarded, not dropped.
    pub fn strict(mut self) -> Fd {
        self.strict = true;
        self
    }

    pub fn close(mut self) {
        self.strict = false;
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let mut books = self.ledger.0.borrow_mut();
        books.live.remove(&self.id).expect("a descriptor is dropped once");
        if self.strict && !books.lenient {
            books.lost.push(self.file);
        }
    }
}

impl fmt::Debug for Fd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fd {} of file {}", self.id, self.file.0)
    }
}
