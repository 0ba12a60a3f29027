//! What is put into a request on its way out: what routes say, and secrets in place of placeholders.
//!
//! Invariants
//! - A route uses a secret only for hosts that the secret is bound to, if it is bound at all. A
//!   placeholder of the code itself is replaced only if the policy names the secret and the secret is
//!   bound to this very host; else it stays as it is. Where the host is right, and the port or the lack
//!   of TLS is not, the request is refused ([`secrets`](super::secrets)).
//! - What was put in is not looked through again, and where it stands it can't end what it stands in: it
//!   is encoded, or refused.
//! - What a route sets replaces what the guest sent under the same name.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, Uri};
use serde_json::value::RawValue;
use torpor_protocol::{Network, Route};

use super::body::Kind;
use super::forms::Form;
use super::placeholder::{self, Script};
use super::refusal::Refusal;
use super::secrets::{PolicySecrets, Target, Used, Value, Values};
use crate::policy::{begins, canonical};

/// What is to be put into one request.
pub(super) struct Injection<'a> {
    routes: Vec<&'a Route>,
    of_routes: Values,
    of_the_code: Values,
    pub(super) used: Used,
}

impl<'a> Injection<'a> {
    /// What this policy says about a request, with the secrets it takes.
    pub(super) fn prepare(
        secrets: &PolicySecrets,
        network: &'a Network,
        target: Target<'_>,
        method: &Method,
        path: &str,
    ) -> Result<Self, Refusal> {
        let routes = network.routes.iter().filter(|route| is_for(route, target.host, method, path));
        let routes: Vec<_> = routes.collect();
        let of_routes = secrets.of_routes(&routes, target)?;
        let of_the_code = secrets.of_the_code(&network.secrets, target);
        Ok(Self { routes, of_routes, of_the_code, used: Used::default() })
    }

    /// Changes the headers. The body is not looked at yet, see [`Injection::wants`].
    pub(super) fn headers(&mut self, headers: &mut HeaderMap) -> Result<(), Refusal> {
        let routed = self.routed_headers()?;
        for name in routed.keys() {
            headers.remove(name);
        }
        for (name, value) in headers.iter_mut() {
            self.replace_in_header(name, value)?;
        }
        headers.extend(routed);
        Ok(())
    }

    /// The target with what goes into it.
    pub(super) fn target(&mut self, path: &str, query: Option<&str>) -> Result<Uri, Refusal> {
        let replaced =
            self.used.replace(path.as_bytes(), Script::Encoded, &self.of_the_code, Form::Path)?;
        let mut target = replaced.unwrap_or_else(|| path.as_bytes().to_vec());
        let fields = self.fields(|route| &route.query)?;
        if let Some(query) = self.pairs(query.map(str::as_bytes), &fields)? {
            target.push(b'?');
            target.extend_from_slice(&query);
        }
        let target = PathAndQuery::from_maybe_shared(Bytes::from(target));
        target.map(Uri::from).map_err(|_| Refusal::Malformed("its target is none"))
    }

    /// Whether a body of this kind has to be there whole.
    pub(super) fn wants(&self, kind: Kind) -> bool {
        self.must() || (kind != Kind::Opaque && !self.of_the_code.is_empty())
    }

    /// Whether it can't go out without a change.
    pub(super) fn must(&self) -> bool {
        self.routes.iter().any(|route| !route.body.is_empty())
    }

    /// The body with what goes into it; none if it stays as it is.
    pub(super) fn body(&mut self, kind: Kind, body: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
        let fields = self.fields(|route| &route.body)?;
        match kind {
            Kind::Json => {
                let code = &self.of_the_code;
                let replaced = self.used.replace(body, Script::Plain, code, Form::Json)?;
                if fields.is_empty() {
                    return Ok(replaced);
                }
                with_members(replaced.as_deref().unwrap_or(body), &fields).map(Some)
            }
            Kind::Form => {
                let pairs = self.pairs(Some(body), &fields)?.unwrap_or_default();
                Ok((pairs != body).then_some(pairs))
            }
            Kind::Text | Kind::Opaque if !fields.is_empty() => Err(Refusal::BodyKind),
            Kind::Text => self.used.replace(body, Script::Plain, &self.of_the_code, Form::Raw),
            Kind::Opaque => Ok(None),
        }
    }

    /// What routes set in one place, with the secrets in it. A later route replaces what an earlier one
    /// said.
    fn fields(
        &mut self,
        place: impl Fn(&Route) -> &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, Refusal> {
        let mut fields = BTreeMap::new();
        for (name, template) in self.routes.iter().flat_map(|route| place(route)) {
            fields.insert(name.clone(), self.used.fill(template, &self.of_routes)?);
        }
        Ok(fields)
    }

    fn routed_headers(&mut self) -> Result<HeaderMap, Refusal> {
        let mut routed = HeaderMap::new();
        for (name, template) in self.routes.iter().flat_map(|route| &route.headers) {
            let bad = || Refusal::BadHeader(name.clone());
            let header = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
            if torpor_headers::is_framing(&header) {
                return Err(bad());
            }
            let filled = self.used.fill(template, &self.of_routes)?;
            let unfit = |_| match placeholder::names(template.as_bytes()).into_iter().next() {
                Some(secret) => Refusal::Unfit(secret),
                None => bad(),
            };
            let mut value = HeaderValue::try_from(filled).map_err(unfit)?;
            // Neither shown by a log, nor kept by the compression of HTTP/2.
            value.set_sensitive(true);
            routed.insert(header, value);
        }
        Ok(routed)
    }

    fn replace_in_header(
        &mut self,
        name: &HeaderName,
        value: &mut HeaderValue,
    ) -> Result<(), Refusal> {
        let code = &self.of_the_code;
        if code.is_empty() {
            return Ok(());
        }
        let mut replaced = self.used.replace(value.as_bytes(), Script::Plain, code, Form::Raw)?;
        if replaced.is_none() && *name == header::AUTHORIZATION {
            replaced = self.replace_in_basic(value.as_bytes())?;
        }
        let Some(replaced) = replaced else { return Ok(()) };
        let unfit = || {
            let names = self.used.names.iter();
            let mut unfit = names.filter(|name| {
                let value = self.of_the_code.get(*name).map(Value::text);
                value.is_some_and(|value| HeaderValue::from_str(value).is_err())
            });
            unfit.next().cloned().map_or(Refusal::Malformed("a header is none"), Refusal::Unfit)
        };
        *value = HeaderValue::from_bytes(&replaced).map_err(|_| unfit())?;
        value.set_sensitive(true);
        Ok(())
    }

    /// Programs encode a name and a password, and with it the placeholder in it.
    fn replace_in_basic(&mut self, value: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
        let Some((scheme, coded)) = value.split_at_checked(6) else { return Ok(None) };
        if !scheme.eq_ignore_ascii_case(b"basic ") {
            return Ok(None);
        }
        let Ok(plain) = STANDARD.decode(coded.trim_ascii()) else { return Ok(None) };
        let code = &self.of_the_code;
        let replaced = self.used.replace(&plain, Script::Plain, code, Form::Raw)?;
        Ok(replaced.map(|replaced| [b"Basic ", STANDARD.encode(replaced).as_bytes()].concat()))
    }

    /// `a=1&b=2` without the pairs that routes set, with secrets in it, and with what routes set; none
    /// if nothing is left and there was nothing.
    fn pairs(
        &mut self,
        pairs: Option<&[u8]>,
        fields: &BTreeMap<String, String>,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let Some(pairs) = pairs.or((!fields.is_empty()).then_some(b"".as_slice())) else {
            return Ok(None);
        };
        let set = |pair: &[u8]| {
            let key = pair.split(|byte| *byte == b'=').next().unwrap_or_default();
            fields.keys().any(|field| field.as_bytes() == decoded(key))
        };
        let mut kept = pairs.to_vec();
        if !fields.is_empty() {
            let left = pairs.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty());
            kept = left.filter(|pair| !set(pair)).collect::<Vec<_>>().join(b"&".as_slice());
        }
        let code = &self.of_the_code;
        let replaced = self.used.replace(&kept, Script::Encoded, code, Form::Query)?;
        let mut all = replaced.unwrap_or(kept);
        for (name, value) in fields {
            if !all.is_empty() {
                all.push(b'&');
            }
            all.extend(Form::Query.write(name));
            all.push(b'=');
            all.extend(Form::Query.write(value));
        }
        Ok(Some(all))
    }
}

fn is_for(route: &Route, host: &str, method: &Method, path: &str) -> bool {
    let hosts = route.hosts.iter().any(|one| one.matches(host));
    let same = |one: &String| one.eq_ignore_ascii_case(method.as_str());
    let methods = route.methods.is_empty() || route.methods.iter().any(same);
    let paths = || {
        let path = canonical(path);
        path.is_some_and(|path| route.paths.iter().any(|prefix| begins(&path, prefix)))
    };
    hosts && methods && (route.paths.is_empty() || paths())
}

/// Whether paths decide about routes for this host.
pub(super) fn paths_matter(network: &Network, host: &str) -> bool {
    let here = |route: &&Route| route.hosts.iter().any(|one| one.matches(host));
    network.routes.iter().filter(here).any(|route| !route.paths.is_empty())
}

/// An object with these guests, in place of those of the same name. The others stay as they are
/// written.
fn with_members(body: &[u8], fields: &BTreeMap<String, String>) -> Result<Vec<u8>, Refusal> {
    let object: Result<BTreeMap<String, Box<RawValue>>, _> = serde_json::from_slice(body);
    let mut object = object.map_err(|_| Refusal::BodyKind)?;
    for (name, value) in fields {
        let value = serde_json::value::to_raw_value(value).map_err(|_| Refusal::BodyKind)?;
        object.insert(name.clone(), value);
    }
    serde_json::to_vec(&object).map_err(|_| Refusal::BodyKind)
}

/// The name of a pair without its percent signs and pluses.
fn decoded(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        let code = behind.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match (first, code.and_then(|digits| u8::from_str_radix(digits, 16).ok())) {
            (b'%', Some(byte)) => {
                plain.push(byte);
                rest = &behind[2..];
            }
            (b'+', _) => plain.push(b' '),
            (byte, _) => plain.push(*byte),
        }
    }
    plain
}
