//! `weightd probe`: whether a process of this machine can still import what a daemon holds. Some
//! engine could not, and the launcher, which loads no device, wants to know whose fault that is.

use crate::args::ProbeArgs;
use crate::error::CliError;
use rustix::process::setsid;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use weightd_blocking::map_regions;
use weightd_core::content::manifest::MAX_BYTES;
use weightd_core::content::{HandleKind, Manifest};
use weightd_core::machine::check_descriptors;
use weightd_core::peer::Facts;
use weightd_core::text::short;
use weightd_core::wire::message::{ErrorCode, Failure, Message, Report, Reported, State};
use weightd_core::wire::{Decoder, FrameError};
use weightd_gpu::{Device, MemoryError, Opened};
use weightd_socket::message::{ReceiveError, receive, send};

/// The longest reason that is passed on, in bytes.
const MAX_REASON: usize = 1000;

pub fn run(_: &ProbeArgs) -> Result<ExitCode, CliError> {
    // Its own session: Ctrl-C and hang-up reach the launcher, which ends everything in order. It
    // fails only where this process leads a session already.
    let _ = setsid();
    let channel = std::io::stdin();
    // It was sent before this process was started.
    let (message, descriptors) = hear(channel.as_fd(), &mut Decoder::default())
        .map_err(CliError::Failure)?
        .ok_or_else(|| CliError::failure("a launcher starts this, and says what to import"))?;
    let Message::State(state) = message else {
        let name = message.name();
        return Err(CliError::Failure(format!(
            "expected a State message, not a {name}"
        )));
    };
    let answer = answer(&state, descriptors);
    say(channel.as_fd(), &answer, &[]).map_err(CliError::Failure)?;
    Ok(ExitCode::SUCCESS)
}

/// What became of the import.
fn answer(state: &State, descriptors: Vec<(Facts, OwnedFd)>) -> Message {
    let cut = |why: String| short(&why, MAX_REASON);
    let unclear = |why: String| Failure {
        code: ErrorCode::Busy.number(),
        retryable: true,
        message: cut(why),
    };
    let lost = |why: String| Report {
        daemon: 0,
        generation: state.generation,
        import_failed: cut(why),
    };
    let (manifest, descriptors) = match open(state, descriptors) {
        Ok(opened) => opened,
        Err(why) => return unclear(why).into(),
    };
    let manifest = match state.manifest(&manifest) {
        Ok(manifest) => manifest,
        // What its publisher stated is not so, for any engine.
        Err(fault) => return lost(fault.to_string()).into(),
    };
    // A device that this process cannot use, for want of room or of a right to it, may well have its
    // memory.
    let _device = match reach(state) {
        Ok(device) => device,
        Err(why) => return unclear(why).into(),
    };
    match touch(&manifest, descriptors) {
        Ok(()) => Reported {}.into(),
        Err(error @ (MemoryError::OutOfMemory { .. } | MemoryError::System { .. })) => {
            unclear(error.to_string()).into()
        }
        Err(error) => lost(error.to_string()).into(),
    }
}

/// The bytes of the manifest, which is in host memory, and the descriptors of the regions.
fn open(state: &State, descriptors: Vec<(Facts, OwnedFd)>) -> Result<(Vec<u8>, Vec<OwnedFd>), String> {
    let facts = descriptors.iter().map(|(facts, _)| facts);
    check_descriptors(&state.content, facts).map_err(|error| error.to_string())?;
    let mut descriptors = descriptors.into_iter().map(|(_, descriptor)| descriptor);
    let manifest = descriptors
        .next()
        .expect("the check counted the manifest's descriptor");
    let manifest = weightd_gpu::read_sealed(manifest, MAX_BYTES as u64).map_err(|error| error.to_string())?;
    Ok((manifest, descriptors.collect()))
}

/// Makes the device ready where there is one.
fn reach(state: &State) -> Result<Option<Opened>, String> {
    let on_host = |handle| handle == HandleKind::Memfd;
    if state.content.regions.iter().all(|region| on_host(region.handle)) {
        return Ok(None);
    }
    let devices = Device::cuda().map_err(|error| error.to_string())?;
    let uuid = state.device_uuid;
    let device = devices
        .iter()
        .find(|device| device.uuid() == uuid)
        .ok_or_else(|| format!("this process sees no CUDA device {uuid}"))?;
    device.open().map(Some).map_err(|error| error.to_string())
}

/// Maps every region, and reads its first byte.
fn touch(manifest: &Manifest, descriptors: Vec<OwnedFd>) -> Result<(), MemoryError> {
    for mapping in map_regions(manifest, descriptors)? {
        let mut first = [0];
        let there = mapping.bytes().min(1) as usize;
        mapping.read(0, &mut first[..there])?;
    }
    Ok(())
}

/// Says one message on a channel that has room for it, since nothing else was said there.
pub fn say(channel: impl AsFd, message: &Message, descriptors: &[OwnedFd]) -> Result<(), String> {
    let bytes = message
        .frame(1, descriptors.len())
        .map_err(|error| error.to_string())?;
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    match send(channel, &bytes, &descriptors) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(sent) => Err(format!("sent {sent} of {} bytes", bytes.len())),
        Err(error) => Err(error.to_string()),
    }
}

/// A message, and what came with it.
pub type Heard = (Message, Vec<(Facts, OwnedFd)>);

/// What the other side has said; `None` while that is not all there.
pub fn hear(channel: impl AsFd, decoder: &mut Decoder<OwnedFd>) -> Result<Option<Heard>, String> {
    let mut buffer = [0; 4096];
    loop {
        let framed = decoder
            .next_frame()
            .map_err(|error: FrameError| error.to_string());
        if let Some(frame) = framed? {
            let message = Message::decode(frame.kind, &frame.body).map_err(|error| error.to_string())?;
            return Ok(Some((message, frame.descriptors)));
        }
        let mut descriptors = Vec::new();
        match receive(&channel, &mut buffer, &mut descriptors) {
            Ok(received) if received.bytes > 0 => decoder
                .push(&buffer[..received.bytes], descriptors, received.truncated)
                .map_err(|error| error.to_string())?,
            Ok(_) => return Err("the other side ended without a word".to_owned()),
            Err(ReceiveError::WouldBlock) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        }
    }
}
