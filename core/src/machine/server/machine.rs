//! The inputs of a server, and its outputs.

use super::{Conn, Server, ServerEvent};
use crate::machine::link::Link;
use crate::machine::{ConnId, DiscardId, Machine, Origin, Outgoing, Output};
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::ErrorCode;

impl<F> Machine<F> for Server<F> {
    type Event = ServerEvent;

    fn accept(&mut self, now: Now, origin: Origin, peer: Peer) -> ConnId {
        let id = ConnId(self.next_conn);
        self.next_conn += 1;
        let trusted = peer.is_trusted_by(self.uid);
        while self.connection_count() >= self.limits.connections && self.close_an_ending_one() {}
        // A stranger never costs one of ours its place.
        if trusted && self.connection_count() >= self.limits.connections {
            self.evict_quietest(now, false);
        }
        self.conns.insert(
            id,
            Conn {
                origin,
                peer,
                link: Link::default(),
                watch: None,
                states_sent: 0,
                waiting: false,
                closing: false,
                last_request: now,
                last_write: now,
                interest: (false, false),
                deadline: None,
                mid_frame_since: None,
                held: 0,
            },
        );
        if !trusted {
            let why = format!(
                "user {} may not speak with this daemon of user {}: run the engine as the same user",
                peer.uid, self.uid
            );
            self.expel(id, 0, ErrorCode::RefusedPeer, &why);
        } else if self.connection_count() > self.limits.connections
            && self.connections().filter(|conn| !conn.closing).count() > self.limits.connections
        {
            self.expel(
                id,
                0,
                ErrorCode::Busy,
                "too many connections wait for an answer: try again",
            );
        }
        self.settle(now, Some(id));
        id
    }

    fn accept_failed(&mut self, now: Now) {
        let made_room = self.close_an_ending_one() || self.evict_quietest(now, true);
        // A long queue must pass through the room that each of its heads leaves.
        let pause = if made_room {
            Span::millis(1)
        } else {
            Span::millis(100)
        };
        self.paused_until = Some(now + pause);
        self.settle(now, None);
    }

    fn receive(
        &mut self,
        now: Now,
        id: ConnId,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        match self.conns.get_mut(&id) {
            Some(conn) if !conn.closing => {
                if let Err(error) = conn.link.receive(bytes, descriptors, truncated) {
                    self.expel(id, 0, ErrorCode::BadDescriptors, &error.to_string());
                }
            }
            _ => self.reaper.bury_received(descriptors),
        }
        self.settle(now, Some(id));
        self.end_hoarders(now);
    }

    fn outgoing(&self, conn: ConnId) -> Option<Outgoing<'_, F>> {
        self.conns.get(&conn)?.link.outgoing()
    }

    fn wrote(&mut self, now: Now, id: ConnId, bytes: usize) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.link.wrote(bytes);
            if bytes > 0 {
                conn.last_write = now;
            }
        }
        self.settle(now, Some(id));
    }

    fn hangup(&mut self, now: Now, id: ConnId) {
        self.close(id);
        self.settle(now, None);
    }

    fn discarded(&mut self, now: Now, id: DiscardId) {
        self.reaper.discarded(id);
        self.settle(now, None);
    }

    fn tick(&mut self, now: Now) {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            let Some(conn) = self.conns.get(&id) else { break };
            if conn.closing || !conn.link.is_flushed() {
                let (origin, peer) = (conn.origin, conn.peer);
                if !conn.closing {
                    let why = "did not read its reply in time".to_owned();
                    self.event(ServerEvent::Ended { origin, peer, why });
                }
                self.close(id);
            } else {
                let why = if conn.waiting {
                    "this takes long and goes on; ask for the status to see it done".to_owned()
                } else if conn.watch.is_some() {
                    format!("half a request, and not the rest of it in {}", self.limits.idle)
                } else {
                    let idle = self.limits.idle;
                    format!("no whole request in {idle}; a lease is made with a watch request")
                };
                self.expel(id, 0, ErrorCode::Timeout, &why);
                self.refresh(now, id);
            }
        }
        if !self.was_led && now >= self.started + self.limits.leaderless {
            self.stop(now, true);
        }
        if let Some(search) = self.search.as_mut().filter(|search| search.at <= now) {
            search.at = now + self.limits.look;
            self.event(ServerEvent::Look);
        }
        self.settle(now, None);
    }

    fn poll(&mut self) -> Output<F, ServerEvent> {
        if let Some(output) = self.output.pop_front() {
            return output;
        }
        if let Some((id, descriptor)) = self.reaper.next_discard() {
            return Output::Discard { id, descriptor };
        }
        let lead_by =
            (!self.was_led && self.stopping.is_none()).then(|| self.started + self.limits.leaderless);
        let stop_by = self.stopping.filter(|_| !self.stopped).map(|(by, _)| by);
        let look_at = self.search.as_ref().filter(|_| self.stopping.is_none());
        let look_at = look_at.map(|search| search.at);
        let first = self.deadlines.first().map(|(deadline, _)| *deadline);
        let wake_at = [first, lead_by, stop_by, look_at, self.paused_until]
            .into_iter()
            .flatten()
            .min();
        Output::Idle {
            wake_at,
            accepting: self.paused_until.is_none(),
        }
    }
}
