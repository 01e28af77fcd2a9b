//! Repositories in the local cache of the Hugging Face Hub. Nothing is downloaded.
//!
//! The layout is that of <https://huggingface.co/docs/hub/local-cache>: in the folder
//! `models--OWNER--NAME` (or `models--NAME`), `refs/REVISION` holds the commit of a branch, tag or pull
//! request, and `snapshots/COMMIT` the files, as links into `blobs/`.

use crate::error::{CheckpointError, IndexFault, excerpt};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use weightd_core::text::short;

/// The local cache of the Hugging Face Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCache {
    /// Where it is, unless nothing says so.
    dir: Option<PathBuf>,
    /// Whether that is where `hf` looks when nothing is set, so that its commands need not name it.
    is_default: bool,
}

/// Where a model was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundModel {
    /// The directory of its checkpoint.
    pub dir: PathBuf,
    /// The repository and the revision of which that is a snapshot; `None` for a directory that was given.
    pub repository: Option<(String, String)>,
}

/// Why a repository id led to no directory. Each message is one line that says what is wrong, where, and
/// what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum HubError {
    /// Neither a directory nor in the cache.
    #[error(
        "{repository}: no such directory, and no repository in the cache {}; give a directory, or download it with \
         `{command}`", shown(.cache)
    )]
    NotCached {
        repository: String,
        cache: PathBuf,
        command: String,
    },
    /// The repository is in the cache, but not at this revision.
    #[error(
        "{repository}: the cache {} does not hold revision {revision:?}; download it with `{command}`", shown(.cache)
    )]
    RevisionNotCached {
        repository: String,
        revision: String,
        cache: PathBuf,
        command: String,
    },
    /// Not the name of a branch, tag, pull request or commit.
    #[error(
        "revision {}: not the name of a branch, a tag, refs/pr/N or a commit; correct it", excerpt(.revision)
    )]
    BadRevision { revision: String },
    /// What the cache says the revision is cannot be: not a commit, or not a file.
    #[error("{}: {why}; remove it and download with `{command}`", shown(.path))]
    BadReference {
        path: PathBuf,
        why: &'static str,
        command: String,
    },
    /// Nothing says where the cache is.
    #[error(
        "{repository}: no such directory; to look for it as a repository in the cache, set HF_HOME or HOME"
    )]
    NoCache { repository: String },
    /// The operating system refused.
    #[error("{}: cannot look for the repository: {source}", shown(.path))]
    Io { path: PathBuf, source: std::io::Error },
}

/// The revision where none is named.
const DEFAULT_REVISION: &str = "main";
/// The most that a part of a repository's name takes, in bytes; the Hub allows no more.
const NAME_CAP: usize = 96;
/// The most that the name of a revision takes, in bytes; git's files allow no more.
const REVISION_CAP: usize = 255;
/// The hexadecimal digits of a commit.
const COMMIT_DIGITS: usize = 40;

impl HubCache {
    /// The cache that `hf` and engines use in this environment. The only place that reads it:
    /// `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE` (its old name), else `HF_HOME/hub`, else
    /// `XDG_CACHE_HOME/huggingface/hub`, else `HOME/.cache/huggingface/hub`. What is empty counts as not set,
    /// and `~` at the beginning is `HOME`.
    pub fn from_env() -> HubCache {
        HubCache::of(|name| std::env::var_os(name))
    }

    /// The same where `variable` says what is set.
    pub fn of(variable: impl Fn(&str) -> Option<OsString>) -> HubCache {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let path = |name: &str| variable(name).map(|value| expanded(value, home.as_deref()));
        let named = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| path("HF_HOME").map(|dir| dir.join("hub")))
            .or_else(|| path("XDG_CACHE_HOME").map(|dir| dir.join("huggingface/hub")));
        let is_default = named.is_none();
        let default = || home.as_ref().map(|dir| dir.join(".cache/huggingface/hub"));
        HubCache {
            dir: named.or_else(default),
            is_default,
        }
    }

    /// The cache in this directory.
    pub fn at(dir: &Path) -> HubCache {
        HubCache {
            dir: Some(dir.to_owned()),
            is_default: false,
        }
    }

    /// Where the checkpoint of `model` is: in the directory of this name, which comes first, or, where it has
    /// the form of a repository id, `OWNER/NAME` or `NAME`, in the snapshot of it that the cache holds at
    /// `revision` (a branch, tag, `refs/pr/N` or whole commit; empty for `main`). A path that can be no
    /// repository comes back as it is, for [`Checkpoint::open`](crate::Checkpoint::open) to say what it is.
    ///
    /// Whether all files of the snapshot are there shows when it is opened.
    ///
    /// # Errors
    /// A repository or revision that the cache lacks, with the command that downloads it; names and contents
    /// of the cache that could lead elsewhere.
    pub fn find(&self, model: &Path, revision: &str) -> Result<FoundModel, HubError> {
        let repository = match model.to_str().filter(|text| is_repository_id(text)) {
            Some(repository) if !exists(model) => repository,
            _ => {
                return Ok(FoundModel {
                    dir: model.to_owned(),
                    repository: None,
                });
            }
        };
        let revision = if revision.is_empty() {
            DEFAULT_REVISION
        } else {
            revision
        };
        if !is_revision(revision) {
            let revision = revision.to_owned();
            return Err(HubError::BadRevision { revision });
        }
        let Some(cache) = &self.dir else {
            let repository = repository.to_owned();
            return Err(HubError::NoCache { repository });
        };
        Ok(FoundModel {
            dir: self.snapshot(cache, repository, revision)?,
            repository: Some((repository.to_owned(), revision.to_owned())),
        })
    }

    fn snapshot(&self, cache: &Path, repository: &str, revision: &str) -> Result<PathBuf, HubError> {
        let command = || download(repository, revision, (!self.is_default).then_some(cache));
        let not_cached = || HubError::NotCached {
            repository: repository.to_owned(),
            cache: cache.to_owned(),
            command: command(),
        };
        let no_revision = || HubError::RevisionNotCached {
            repository: repository.to_owned(),
            revision: revision.to_owned(),
            cache: cache.to_owned(),
            command: command(),
        };
        let path = cache.join(folder_of(repository));
        // The cache, and a repository in it, may be links to where there is room. Nothing in it is.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(not_cached()),
            Err(errno) => return Err(failed(&path, errno)),
        };
        let commit = if is_commit(revision) {
            revision.to_owned()
        } else {
            let reference = Path::new("refs").join(revision);
            let bad = |why| HubError::BadReference {
                path: path.join(&reference),
                why,
                command: command(),
            };
            match read_reference(&folder, &reference) {
                Ok(commit) => commit,
                Err(BadReference::Absent) => return Err(no_revision()),
                Err(BadReference::Wrong(why)) => return Err(bad(why)),
                Err(BadReference::Io(errno)) => return Err(failed(&path.join(&reference), errno)),
            }
        };
        let snapshot = Path::new("snapshots").join(commit);
        match open_below(&folder, &snapshot, OFlags::DIRECTORY) {
            Ok(_) => Ok(path.join(snapshot)),
            Err(Errno::NOENT) => Err(no_revision()),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(HubError::BadReference {
                path: path.join(&snapshot),
                why: "not a directory",
                command: command(),
            }),
            Err(errno) => Err(failed(&path.join(&snapshot), errno)),
        }
    }
}

/// What to do about a snapshot of the cache that `error` says is not whole; `None` where `dir` is none, or
/// the error is another.
pub(crate) fn completion(dir: &Path, error: &CheckpointError) -> Option<String> {
    use CheckpointError as Error;
    let is_missing = match error {
        Error::NoConfig { .. }
        | Error::NoSafetensors { .. }
        | Error::NoIndex { .. }
        | Error::DanglingLink { .. } => true,
        Error::Index { fault, .. } => matches!(fault, IndexFault::MissingFile { .. }),
        Error::Header { .. } | Error::Config { .. } => false,
        _ => return None,
    };
    let text = |dir: &Path| dir.file_name().and_then(OsStr::to_str).map(str::to_owned);
    let commit = text(dir).filter(|commit| is_commit(commit))?;
    let folder = dir.parent().filter(|dir| dir.ends_with("snapshots"))?.parent()?;
    let repository = text(folder)?.strip_prefix("models--")?.replacen("--", "/", 1);
    let cache = folder.parent().filter(|_| is_repository_id(&repository))?;
    let command = download(&repository, &commit, Some(cache));
    Some(match (is_missing, was_broken_off(folder)) {
        (true, true) => format!(
            "a download of {repository} is under way or was broken off: wait, or complete it with `{command}`"
        ),
        (true, false) => format!("complete the download of {repository} with `{command}`"),
        // A file that is there counts as downloaded, whatever is in it.
        (false, _) => {
            format!("if it is otherwise at the Hub, download it again with `{command} --force-download`")
        }
    })
}

/// Whether a repository's folder holds parts of files. Not more than a few thousand names are looked at.
fn was_broken_off(folder: &Path) -> bool {
    const LOOKED_AT: usize = 4096;
    let blobs = std::fs::read_dir(folder.join("blobs"));
    let mut names = blobs.into_iter().flatten().take(LOOKED_AT).flatten();
    names.any(|blob| blob.path().extension().is_some_and(|end| end == "incomplete"))
}

/// The command that downloads a revision of a repository.
fn download(repository: &str, revision: &str, cache: Option<&Path>) -> String {
    let revision = match revision {
        DEFAULT_REVISION => String::new(),
        other => format!(" --revision {}", quoted(other)),
    };
    let cache = cache.map(|cache| format!(" --cache-dir {}", quoted(&cache.display().to_string())));
    format!("hf download {repository}{revision}{}", cache.unwrap_or_default())
}

/// For a shell, as it is where that needs nothing.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@,:=".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else if text.chars().any(char::is_control) {
        format!("$'{}'", text.escape_debug())
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// A path on one line.
fn shown(path: &Path) -> String {
    const LONGEST: usize = 4096;
    short(&path.display().to_string(), LONGEST)
}

fn expanded(value: OsString, home: Option<&Path>) -> PathBuf {
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

/// Whether something has this name. What may not be asked may be there.
fn exists(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// Whether `text` has the form `OWNER/NAME` or `NAME` of a repository of the Hub.
fn is_repository_id(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_part = |part: &str| {
        part.len() <= NAME_CAP
            && part.starts_with(is_word)
            && part.ends_with(is_word)
            && part.chars().all(|c| is_word(c) || "-.".contains(c))
            // The Hub allows neither; so folders of different repositories have different names.
            && !part.contains("--")
            && !part.contains("..")
    };
    let (owner, name) = text.split_once('/').unwrap_or(("owner", text));
    is_part(owner) && is_part(name)
}

/// The folder of a repository in the cache.
fn folder_of(repository: &str) -> String {
    format!("models--{}", repository.replace('/', "--"))
}

/// Whether this can be the name of a branch, a tag or the like, by git's rules, and so a path below `refs`
/// that leads nowhere else.
fn is_revision(text: &str) -> bool {
    let is_shown = |c: char| c.escape_debug().len() == 1 && !c.is_whitespace();
    text.len() <= REVISION_CAP
        && !text.starts_with('-')
        && text.chars().all(|c| is_shown(c) && !"~^:?*[".contains(c))
        && text
            .split('/')
            .all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(".."))
}

fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS
        && text
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

enum BadReference {
    Absent,
    Wrong(&'static str),
    Io(Errno),
}

/// The commit that the file `reference` in the folder of a repository names.
fn read_reference(folder: &OwnedFd, reference: &Path) -> Result<String, BadReference> {
    let file = open_below(folder, reference, OFlags::NONBLOCK).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => BadReference::Absent,
        Errno::LOOP => BadReference::Wrong("a symbolic link, where the cache has a file with a commit"),
        Errno::NXIO => BadReference::Wrong("not a file"),
        errno => BadReference::Io(errno),
    })?;
    let stat = rustix::fs::fstat(&file).map_err(BadReference::Io)?;
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
        return Err(BadReference::Wrong("not a file"));
    }
    let no_commit = BadReference::Wrong("not a commit of 40 hexadecimal digits");
    // Some tools end the line.
    let mut bytes = [0; COMMIT_DIGITS + 3];
    let length = rustix::io::read(&file, &mut bytes).map_err(BadReference::Io)?;
    let text = std::str::from_utf8(&bytes[..length]).unwrap_or_default();
    match text.trim_end_matches(['\r', '\n']) {
        commit if is_commit(commit) => Ok(commit.to_owned()),
        _ => Err(no_commit),
    }
}

/// Opens what is below a directory, following no link on the way.
fn open_below(folder: &OwnedFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let always = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut names = path.components().peekable();
    let mut dir: Option<OwnedFd> = None;
    while let Some(Component::Normal(name)) = names.next() {
        let last = names.peek().is_none();
        let flags = always | if last { flags } else { OFlags::DIRECTORY };
        let next = match &dir {
            Some(dir) => rustix::fs::openat(dir, name, flags, Mode::empty())?,
            None => rustix::fs::openat(folder, name, flags, Mode::empty())?,
        };
        if last {
            return Ok(next);
        }
        dir = Some(next);
    }
    Err(Errno::NOENT)
}

fn failed(path: &Path, errno: Errno) -> HubError {
    HubError::Io {
        path: path.to_owned(),
        source: errno.into(),
    }
}
