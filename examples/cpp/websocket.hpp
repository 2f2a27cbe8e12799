// A blocking WebSocket client (RFC 6455) on POSIX sockets: binary messages out, any message in.
// Knows nothing about what the messages mean. Every wait has a deadline.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>

namespace plugrl {

// The connection is over. 1006 means that it was lost without a close frame.
struct Closed : std::runtime_error {
    Closed(int code_, const std::string& reason_)
        : std::runtime_error(std::to_string(code_) + " " + reason_), code(code_), reason(reason_) {}
    int code;
    std::string reason;
};

// There is no WebSocket server there (yet).
struct Unreachable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The server answered the handshake with something other than 101.
struct HttpRefused : std::runtime_error {
    explicit HttpRefused(int status_) : std::runtime_error("HTTP " + std::to_string(status_)), status(status_) {}
    int status;
};

inline std::array<unsigned char, 20> sha1(std::string_view text) {
    const auto rotate = [](std::uint32_t x, int by) { return x << by | x >> (32 - by); };
    std::string padded(text);
    padded += '\x80';
    while (padded.size() % 64 != 56) padded += '\0';
    for (int i = 7; i >= 0; --i) padded += static_cast<char>(std::uint64_t{text.size()} * 8 >> (8 * i) & 0xff);
    std::array<std::uint32_t, 5> h = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
    for (std::size_t block = 0; block < padded.size(); block += 64) {
        std::array<std::uint32_t, 80> w{};
        for (std::size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<unsigned char>(padded[block + i]);
        for (std::size_t i = 16; i < 80; ++i) w[i] = rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        auto [a, b, c, d, e] = h;
        for (std::size_t i = 0; i < 80; ++i) {
            std::uint32_t mix = 0, constant = 0;
            if (i < 20) {
                mix = (b & c) | (~b & d), constant = 0x5a827999;
            } else if (i < 40) {
                mix = b ^ c ^ d, constant = 0x6ed9eba1;
            } else if (i < 60) {
                mix = (b & c) | (b & d) | (c & d), constant = 0x8f1bbcdc;
            } else {
                mix = b ^ c ^ d, constant = 0xca62c1d6;
            }
            const std::uint32_t next = rotate(a, 5) + mix + e + constant + w[i];
            e = d, d = c, c = rotate(b, 30), b = a, a = next;
        }
        h = {h[0] + a, h[1] + b, h[2] + c, h[3] + d, h[4] + e};
    }
    std::array<unsigned char, 20> digest{};
    for (std::size_t i = 0; i < 20; ++i) digest[i] = static_cast<unsigned char>(h[i / 4] >> (24 - 8 * (i % 4)) & 0xff);
    return digest;
}

inline std::string base64(const unsigned char* data, std::size_t size) {
    const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (std::size_t i = 0; i < size; i += 3) {
        std::uint32_t group = 0;
        for (std::size_t j = 0; j < 3; ++j) group = group << 8 | (i + j < size ? data[i + j] : 0u);
        for (std::size_t j = 0; j < 4; ++j) out += i + j <= size ? letters[group >> (18 - 6 * j) & 63] : '=';
    }
    return out;
}

class WebSocket {
  public:
    struct Message {
        bool text = false;
        std::string payload;
    };

    // `header` is an extra header line without its line end, or empty.
    WebSocket(const std::string& host, int port, const std::string& header) {
        try {
            open(host, port);
            shake_hands(host, port, header);
        } catch (...) {
            ::close(fd_);
            throw;
        }
    }
    ~WebSocket() { ::close(fd_); }
    WebSocket(const WebSocket&) = delete;
    WebSocket& operator=(const WebSocket&) = delete;

    void send(std::string_view payload) { send_frame(0x2, payload); }

    // The next text or binary message; answers pings, throws Closed at the end.
    Message receive() {
        Message message;
        bool started = false;
        while (true) {
            const Frame frame = receive_frame();
            if (frame.opcode == 0x9) {
                send_frame(0xa, frame.payload);
            } else if (frame.opcode == 0x8) {
                finish(frame.payload);
            } else if (frame.opcode <= 0x2) {
                if (started == (frame.opcode != 0)) fail(1002, "a fragment out of order");
                if (!started) message.text = frame.opcode == 0x1;
                started = true;
                message.payload += frame.payload;
                if (frame.final) return message;
            } else if (frame.opcode != 0xa) {
                fail(1002, "an unknown opcode");
            }
        }
    }

    // Says goodbye and waits briefly for the answer.
    void close(int code) {
        try {
            send_close(code);
            const auto until = Clock::now() + std::chrono::seconds(2);
            while (Clock::now() < until) {
                patience_ = std::chrono::seconds(2);
                if (receive_frame().opcode == 0x8) return;
            }
        } catch (const Closed&) {
            // Gone without an answer: it is over either way.
        }
    }

  private:
    using Clock = std::chrono::steady_clock;
    struct Frame {
        unsigned opcode = 0;
        bool final = true;
        std::string payload;
    };
    static constexpr std::size_t max_header_bytes = 1 << 16;

    void open(const std::string& host, int port) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
        if (error) throw Unreachable(gai_strerror(error));
        std::string why = "no address";
        for (addrinfo* a = found; a && fd_ < 0; a = a->ai_next) {
            const int fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
            if (fd < 0) continue;
            fcntl(fd, F_SETFL, O_NONBLOCK);
            int status = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
            if (status == EINPROGRESS) {
                pollfd waiting{fd, POLLOUT, 0};
                socklen_t size = sizeof status;
                status = ETIMEDOUT;
                if (::poll(&waiting, 1, 10000) > 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &status, &size);
            }
            if (status == 0) {
                fd_ = fd;
            } else {
                why = std::strerror(status);
                ::close(fd);
            }
        }
        freeaddrinfo(found);
        if (fd_ < 0) throw Unreachable(why);
        const int on = 1;
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }

    void shake_hands(const std::string& host, int port, const std::string& header) {
        std::array<unsigned char, 16> nonce{};
        for (unsigned char& byte : nonce) byte = static_cast<unsigned char>(random_());
        const std::string key = base64(nonce.data(), nonce.size());
        std::string request = "GET / HTTP/1.1\r\nHost: " + host + ":" + std::to_string(port) +
                              "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: " + key +
                              "\r\nSec-WebSocket-Version: 13\r\n";
        if (!header.empty()) request += header + "\r\n";
        patience_ = std::chrono::seconds(10);
        std::string response;
        try {
            write(request + "\r\n");
            while (response.size() < 4 || response.compare(response.size() - 4, 4, "\r\n\r\n") != 0) {
                if (response.size() > max_header_bytes) throw Unreachable("an endless HTTP response");
                response += read(1);
            }
        } catch (const Closed& closed) {
            throw Unreachable(std::string("lost during the handshake: ") + closed.what());
        }
        patience_ = std::chrono::seconds(60);
        if (response.compare(0, 9, "HTTP/1.1 ") != 0) throw Unreachable("not an HTTP server");
        const int status = std::atoi(response.c_str() + 9);
        if (status != 101) throw HttpRefused(status);
        const auto digest = sha1(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
        if (field(response, "sec-websocket-accept") != base64(digest.data(), digest.size())) {
            throw Unreachable("a wrong Sec-WebSocket-Accept");
        }
        if (!field(response, "sec-websocket-extensions").empty()) throw Unreachable("an extension that was not asked for");
    }

    // The value of a header field, its name given in lower case; empty if absent.
    static std::string field(const std::string& response, const std::string& name) {
        for (std::size_t at = response.find("\r\n"); at + 2 < response.size(); at = response.find("\r\n", at + 2)) {
            const std::size_t end = response.find("\r\n", at + 2), colon = response.find(':', at);
            if (end == std::string::npos || colon == std::string::npos || colon > end) continue;
            std::string found = response.substr(at + 2, colon - at - 2);
            std::transform(found.begin(), found.end(), found.begin(), [](unsigned char c) { return std::tolower(c); });
            const std::size_t begin = response.find_first_not_of(" \t", colon + 1);
            const std::size_t last = response.find_last_not_of(" \t\r\n", end);
            if (found == name && begin <= last) return response.substr(begin, last + 1 - begin);
        }
        return "";
    }

    Frame receive_frame() {
        const std::string head = read(2);
        const auto byte = [](char c) { return static_cast<unsigned>(static_cast<unsigned char>(c)); };
        Frame frame;
        frame.final = byte(head[0]) & 0x80;
        frame.opcode = byte(head[0]) & 0x0f;
        if (byte(head[0]) & 0x70) fail(1002, "a reserved bit is set");
        if (byte(head[1]) & 0x80) fail(1002, "a masked frame from the server");
        std::uint64_t size = byte(head[1]) & 0x7f;
        if (frame.opcode & 0x8 && (size > 125 || !frame.final)) fail(1002, "a long or fragmented control frame");
        if (size > 125) {
            const std::string wide = read(size == 126 ? 2 : 8);
            size = 0;
            for (char c : wide) size = size << 8 | byte(c);
            if (size >> 63) fail(1002, "a frame length beyond 2^63");
        }
        while (frame.payload.size() < size) {  // grows with what arrives, not with what is claimed
            frame.payload += read(static_cast<std::size_t>(std::min<std::uint64_t>(size - frame.payload.size(), 1 << 20)));
        }
        return frame;
    }

    void send_frame(unsigned opcode, std::string_view payload) {
        std::string frame(1, static_cast<char>(0x80 | opcode));
        const int width = payload.size() < 126 ? 0 : payload.size() < 65536 ? 2 : 8;
        frame += static_cast<char>(0x80 | (width == 0 ? payload.size() : width == 2 ? 126u : 127u));
        for (int i = width - 1; i >= 0; --i) frame += static_cast<char>(std::uint64_t{payload.size()} >> (8 * i) & 0xff);
        std::array<char, 4> mask{};
        for (char& byte : mask) byte = static_cast<char>(random_());
        frame.append(mask.data(), mask.size());
        const std::size_t start = frame.size();
        frame += payload;
        for (std::size_t i = start; i < frame.size(); ++i) frame[i] = static_cast<char>(frame[i] ^ mask[(i - start) % 4]);
        write(frame);
    }

    void send_close(int code) {
        const char payload[2] = {static_cast<char>(code >> 8), static_cast<char>(code & 0xff)};
        send_frame(0x8, std::string_view(payload, 2));
    }

    [[noreturn]] void finish(const std::string& payload) {
        int code = 1005;
        if (payload.size() >= 2) {
            code = static_cast<unsigned char>(payload[0]) << 8 | static_cast<unsigned char>(payload[1]);
        }
        try {
            send_close(code == 1005 ? 1000 : code);
        } catch (const Closed&) {
            // The server is already gone; what it said still counts.
        }
        throw Closed(code, payload.size() > 2 ? payload.substr(2) : "");
    }

    [[noreturn]] void fail(int code, const char* why) {
        send_close(code);
        throw Closed(code, why);
    }

    // Exactly `size` bytes. Silence is met with pings, and for longer than the patience it is a loss.
    std::string read(std::size_t size) {
        std::string out;
        const auto heard = Clock::now();
        while (out.size() < size) {
            if (begin_ == end_) fill(heard);
            const std::size_t part = std::min(size - out.size(), end_ - begin_);
            out.append(buffer_.data() + begin_, part);
            begin_ += part;
        }
        return out;
    }

    void fill(Clock::time_point heard) {
        const auto pause = std::min<std::chrono::milliseconds>(patience_, std::chrono::seconds(20));
        ssize_t got = -1;
        while (got < 0) {
            pollfd waiting{fd_, POLLIN, 0};
            const int ready = ::poll(&waiting, 1, static_cast<int>(pause.count()));
            if (ready < 0 && errno != EINTR) throw Closed(1006, std::strerror(errno));
            if (ready > 0) {
                got = ::recv(fd_, buffer_.data(), buffer_.size(), 0);
                if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
                    throw Closed(1006, std::strerror(errno));
                }
                continue;
            }
            if (Clock::now() - heard >= patience_) throw Closed(1006, "silence");
            if (ready == 0) send_frame(0x9, "");
        }
        if (got == 0) throw Closed(1006, "connection lost");
        begin_ = 0;
        end_ = static_cast<std::size_t>(got);
    }

    void write(std::string_view data) {
        while (!data.empty()) {
            const ssize_t sent = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
            if (sent > 0) {
                data.remove_prefix(static_cast<std::size_t>(sent));
            } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
                pollfd waiting{fd_, POLLOUT, 0};
                if (::poll(&waiting, 1, static_cast<int>(patience_.count())) == 0) throw Closed(1006, "the server stopped reading");
            } else {
                throw Closed(1006, std::strerror(errno));
            }
        }
    }

    int fd_ = -1;
    std::random_device random_;
    std::chrono::milliseconds patience_ = std::chrono::seconds(60);
    std::string buffer_ = std::string(1 << 16, '\0');
    std::size_t begin_ = 0, end_ = 0;
};

}  // namespace plugrl
