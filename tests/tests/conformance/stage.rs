//! What a scenario needs: a daemon, engines, strangers, and time.

use weightd_blocking::LeaseEvent;
use weightd_core::content::{DeviceUuid, Generation, Key, Role};
use weightd_core::machine::{AttachError, Limits, Mode, PublishError};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{
    ContentInfo, DaemonStatus, ErrorCode, GetStatus, Release, Released, Replace,
};

/// Where a scenario is played: over real sockets, or in virtual time.
///
/// A stage has one daemon at most, and may have none.
pub trait Stage: Sized {
    /// An engine that is out for something, or has it.
    type Engine;
    /// Somebody who is connected to the daemon's socket and says what a scenario wants.
    type Stranger;

    /// A stage for this daemon. One that takes publications is there at once, another when it is loaded.
    fn start(daemon: Daemon) -> Self;

    /// The launcher's loader hands over content, which replaces what there is.
    fn load(&mut self, content: Content) -> Generation;

    /// The loader has computed the digest of the daemon's checkpoint.
    fn digest(&mut self, digest: [u8; 32]);

    /// The launcher finds that the device lost the content.
    fn lose(&mut self);

    /// How many engines could not import the content, as far as the launcher was told.
    fn reports(&mut self) -> usize;

    /// The server dies. Whoever connects meanwhile waits.
    fn kill_server(&mut self);

    /// Another takes its place, and serves what the launcher holds.
    fn start_server(&mut self);

    /// Server and launcher end, and nobody is at the socket any more.
    fn go(&mut self);

    /// Somebody else is at the socket now. `sound`: the content that it hands out can be imported.
    fn impersonate(&mut self, sound: bool, act: Act);

    /// The daemon's device.
    fn device(&self) -> DeviceUuid;

    /// What a daemon says and hands out that has this content.
    fn genuine(&self, content: Content) -> (ContentInfo, Vec<Given>);

    /// An engine sets out.
    fn begin(&mut self, order: Order) -> Self::Engine;

    /// Waits until an engine that [stays](Order::stays) builds or fills.
    fn works(&mut self, engine: &mut Self::Engine);

    /// Waits for the end of what an engine is out for.
    fn end(&mut self, engine: &mut Self::Engine) -> End;

    /// An engine changes to what is served now; in copy mode into the memory that it has.
    fn reload(&mut self, engine: &mut Self::Engine, order: Order) -> End;

    /// The mark of what an engine has, all of which it reads.
    fn reads(&self, engine: &Self::Engine) -> u8;

    /// Waits for what becomes of an engine's lease next.
    fn event(&mut self, engine: &mut Self::Engine) -> LeaseEvent;

    /// What somebody hears at once who begins to listen now.
    fn hears_late(&mut self, engine: &mut Self::Engine) -> Option<LeaseEvent>;

    /// Whether the engine knows that its daemon is lost.
    fn is_lost(&self, engine: &Self::Engine) -> bool;

    /// The engine gives up all that it has.
    fn leave(&mut self, engine: Self::Engine);

    /// Asks the daemon, over a connection for this alone.
    fn ask(&mut self, question: Message) -> Result<Message, ErrorCode>;

    /// Somebody connects.
    fn stranger(&mut self) -> Self::Stranger;

    /// Says as much of this as is taken.
    fn says(&mut self, stranger: &mut Self::Stranger, bytes: &[u8], given: Vec<Given>);

    /// Waits until so many frames were heard; returns all of them.
    fn hears(&mut self, stranger: &mut Self::Stranger, frames: usize) -> Vec<Message>;

    /// Waits for the end of the connection; returns what was heard before.
    fn hears_the_end(&mut self, stranger: &mut Self::Stranger) -> Vec<Message>;

    /// Ends the connection.
    fn hangs_up(&mut self, stranger: Self::Stranger);

    /// Lets time pass.
    fn pass(&mut self, span: Span);

    /// An engine sets out and comes to an end.
    fn run(&mut self, order: Order) -> (Self::Engine, End) {
        let mut engine = self.begin(order);
        let end = self.end(&mut engine);
        (engine, end)
    }

    /// The same for one that then gives up all that it has.
    fn try_out(&mut self, order: Order) -> End {
        let (engine, end) = self.run(order);
        self.leave(engine);
        end
    }

    /// The same for a [brief](Order::brief) engine that is answered: on a busy machine even that may take too long, and
    /// then it sets out again.
    fn run_in_time(&mut self, order: Order) -> (Self::Engine, End) {
        for _ in 0..20 {
            let (engine, end) = self.run(order.clone());
            match end {
                End::Disk(AttachError::Timeout { .. }) | End::Failed(AttachError::Timeout { .. }) => {
                    self.leave(engine);
                }
                end => return (engine, end),
            }
        }
        panic!("nobody answers")
    }

    /// What the daemon says of itself.
    fn status(&mut self) -> DaemonStatus {
        match self.ask(GetStatus {}.into()) {
            Ok(Message::DaemonStatus(status)) => status,
            other => panic!("{other:?} is no status"),
        }
    }

    /// Releases what the daemon has, or only this generation.
    fn release(&mut self, generation: Option<Generation>) -> Result<(), ErrorCode> {
        let release = Release {
            daemon: 0,
            generation,
        };
        let answer = self.ask(release.into())?;
        assert_eq!(answer, Released {}.into());
        Ok(())
    }

    /// Waits until the daemon says this of itself.
    fn settles(&mut self, what: &str, is_so: impl Fn(&DaemonStatus) -> bool) {
        self.comes_to(what, |stage| is_so(&stage.status()));
    }

    /// Waits until this is so.
    fn comes_to(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..6000 {
            if is_so(self) {
                return;
            }
            self.pass(Span::millis(10));
        }
        panic!("it never comes to this: {what}");
    }
}

/// A daemon, and what its server allows.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// Whether it takes publications, and what gives way to them.
    pub publish: Option<Replace>,
    pub no_release: bool,
    pub key: Key,
    pub limits: Limits,
}

impl Daemon {
    /// One that its launcher loads.
    pub fn loaded() -> Daemon {
        Daemon {
            publish: None,
            no_release: false,
            key: key(),
            limits: Limits::default(),
        }
    }

    /// One that takes publications.
    pub fn publishable() -> Daemon {
        Daemon {
            publish: Some(Replace::Keep),
            key: crate::world::place(0),
            ..Daemon::loaded()
        }
    }
}

/// The key of daemon and engine.
pub fn key() -> Key {
    crate::world::key(0)
}

/// The same, but for what was done to the weights.
pub fn processed(how: &str) -> Key {
    Key {
        processing: how.to_owned(),
        ..key()
    }
}

/// One tensor in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// The value of all of its bytes.
    pub mark: u8,
    pub bytes: u64,
    /// Whether its manifest is one.
    pub sound: bool,
}

const fn content(mark: u8, bytes: u64) -> Content {
    Content {
        mark,
        bytes,
        sound: true,
    }
}

pub const FIRST: Content = content(0xA1, 8192);
pub const SECOND: Content = content(0xB2, 8192);
/// A tensor of another shape.
pub const OTHER_SHAPE: Content = content(0xC3, 512);
/// More than any device has.
pub const HUGE: Content = content(0xD4, 1 << 47);
pub const UNSOUND: Content = Content {
    sound: false,
    ..FIRST
};

/// What an engine is out for, and how it goes about it.
#[derive(Clone, Debug)]
pub struct Order {
    pub what: What,
    pub mode: Mode,
    pub fallback: bool,
    pub key: Key,
    pub role: Role,
    /// Whether it runs on the daemon's device.
    pub here: bool,
    /// Whether it runs as the daemon's user.
    pub ours: bool,
    pub connect_timeout: Span,
    pub state_timeout: Span,
    /// What comes of computing the checkpoint's digest.
    pub digest: Result<[u8; 32], String>,
    /// What comes of building the model, or of filling the memory.
    pub work: Result<(), String>,
    /// Whether it stays there until somebody waits for the end.
    pub stays: bool,
}

#[derive(Clone, Debug)]
pub enum What {
    Load,
    /// With what is mapped.
    Reload(Option<Generation>),
    Memory,
    Publish(Content),
}

impl Order {
    /// To map, or to load from disk. Nothing takes as long as this engine would wait.
    pub fn load() -> Order {
        Order {
            what: What::Load,
            mode: Mode::ZeroCopy,
            fallback: true,
            key: key(),
            role: Role::Target,
            here: true,
            ours: true,
            connect_timeout: Span::secs(60),
            state_timeout: Span::secs(120),
            digest: Ok([9; 32]),
            work: Ok(()),
            stays: false,
        }
    }

    pub fn copy() -> Order {
        Order {
            mode: Mode::Copy,
            ..Order::load()
        }
    }

    pub fn memory() -> Order {
        Order {
            what: What::Memory,
            ..Order::load()
        }
    }

    pub fn reload(current: Generation) -> Order {
        Order {
            what: What::Reload(Some(current)),
            ..Order::load()
        }
    }

    /// Under a key that says how.
    pub fn publish(content: Content) -> Order {
        Order {
            what: What::Publish(content),
            key: processed("packed"),
            ..Order::load()
        }
    }

    /// The same by an engine that has nothing to fall back on.
    pub fn patient(self) -> Order {
        Order {
            fallback: false,
            ..self
        }
    }

    /// The same by an engine that waits for a moment only: where that is what it comes to.
    pub fn brief(self) -> Order {
        Order {
            connect_timeout: Span::millis(300),
            state_timeout: Span::millis(300),
            ..self
        }
    }

    pub fn keyed(self, key: Key) -> Order {
        Order { key, ..self }
    }

    /// The same, but its build or fill fails.
    pub fn fails(self) -> Order {
        Order {
            work: Err("no such layer".to_owned()),
            ..self
        }
    }

    /// The same, but it stays at its build or fill.
    pub fn stays(self) -> Order {
        Order { stays: true, ..self }
    }
}

/// How an engine's errand ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Mapped { generation: Generation, leased: bool },
    Copied { generation: Generation, released: bool },
    Unchanged,
    Disk(AttachError),
    Failed(AttachError),
    Memory(u64),
    Published { generation: Generation, leased: bool },
    NotPublished(PublishError),
}

impl End {
    /// Why the engine loads from disk.
    #[track_caller]
    pub fn because(self) -> AttachError {
        match self {
            End::Disk(because) => because,
            other => panic!("{other:?} is no load from disk"),
        }
    }

    #[track_caller]
    pub fn error(self) -> AttachError {
        match self {
            End::Failed(error) => error,
            other => panic!("{other:?} is no failure"),
        }
    }

    #[track_caller]
    pub fn not_published(self) -> PublishError {
        match self {
            End::NotPublished(error) => error,
            other => panic!("{other:?} is no failure to publish"),
        }
    }

    #[track_caller]
    pub fn published(self) -> Generation {
        match self {
            End::Published { generation, .. } => generation,
            other => panic!("{other:?} is no publication"),
        }
    }
}

/// Mapped, and leased.
pub fn mapped(generation: Generation) -> End {
    End::Mapped {
        generation,
        leased: true,
    }
}

/// Copied, and let go by the daemon.
pub fn copied(generation: Generation) -> End {
    End::Copied {
        generation,
        released: true,
    }
}

/// A descriptor to be handed over.
#[derive(Clone, Debug)]
pub enum Given {
    /// Memory that never changes, and what it holds.
    Sealed(Vec<u8>),
    /// Memory that may change.
    Unsealed(Vec<u8>),
    /// No memory at all.
    Other,
}

/// What somebody in a daemon's place does when a connection was made (then nothing was asked yet), and with each
/// request.
pub type Act = Box<dyn FnMut(Option<(&Message, u32)>) -> Reaction + Send>;

#[derive(Clone, Debug, Default)]
pub struct Reaction {
    pub says: Vec<u8>,
    pub gives: Vec<Given>,
    pub ends: bool,
    /// From then on it says the same for as long as anybody listens; over real sockets only.
    pub floods: Vec<u8>,
}

impl Reaction {
    pub fn says(bytes: impl Into<Vec<u8>>) -> Reaction {
        Reaction {
            says: bytes.into(),
            ..Reaction::default()
        }
    }

    /// A whole answer to a request.
    pub fn answers(request: u32, message: impl Into<Message>) -> Reaction {
        Reaction::gives(request, message, Vec::new())
    }

    pub fn gives(request: u32, message: impl Into<Message>, gives: Vec<Given>) -> Reaction {
        Reaction {
            says: crate::world::frame(&message.into(), request, gives.len()),
            gives,
            ..Reaction::default()
        }
    }

    pub fn then_ends(self) -> Reaction {
        Reaction { ends: true, ..self }
    }
}

/// Something is of this form; if not, says what it is.
macro_rules! assert_is {
    ($value:expr, $pattern:pat) => {
        match $value {
            $pattern => {}
            other => panic!("{other:?} is no {}", stringify!($pattern)),
        }
    };
}

pub(crate) use assert_is;
